"""Limits of any engine, and rules of each role for any engine: handoffs, transfers, choices.

A rule is the field, what was found, what is allowed, and whether it is met.

    role                                  handoff                         choices    the prompt is computed
    aggregated                            an encoder's, or none           any        here
    prefill                               an encoder's, or none           1          here, and one token after it
    decode                                a prefill worker's, required    any        by that worker: its KV is fetched
    decode, `is_context_and_generation`   an encoder's, or none           any        here
    encode                                generates nothing: refused

Source: `docs/SOURCES.md` D4.2; NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py`.
"""

from collections.abc import Iterator

from kv_protocol.fleet import Role
from worker_agent.port.types import EngineDescription, EngineRequest

Rule = tuple[str, object, str, bool]


def computed_tokens_max(request: EngineRequest) -> int:
    """Return the most tokens that a generation computes: all but the last."""
    return len(request.prompt) + request.max_tokens - 1


def limits(request: EngineRequest, engine: EngineDescription, *, id_in_use: bool) -> Iterator[Rule]:
    """Yield the rules that a request must pass with an empty pool. A pool of 0 blocks has an unknown size."""
    isl, osl, dp_rank = len(request.prompt), request.max_tokens, request.dp_rank
    yield "request_id", request.request_id, "an id that is not in use", not id_in_use
    yield "dp_rank", dp_rank, f"one of {engine.dp_ranks}", dp_rank is None or dp_rank in engine.dp_ranks
    yield "prompt", f"{isl} tokens", "1 token or more", isl > 0
    yield "max_tokens", osl, "1 or more", osl > 0
    total = f"{isl} prompt tokens + max_tokens {osl}"
    yield "max_tokens", total, f"at most {engine.max_seq_len} together", isl + osl <= engine.max_seq_len
    blocks, pool = -(-computed_tokens_max(request) // engine.block_size), engine.total_kv_blocks
    allowed = f"at most the pool's {pool} blocks"
    yield "max_tokens", f"{total} = {blocks} blocks", allowed, not pool or blocks <= pool


def takes_transfer(request: EngineRequest, role: Role) -> bool:
    """Return whether the engine fetches the prompt's KV from another worker before the first token."""
    return role == "decode" and not request.is_context_and_generation


def role_rules(request: EngineRequest, role: Role) -> Iterator[Rule]:
    """Yield the rules for a request to a worker of `role`, by the table above."""
    handoff, n = request.handoff, request.sampling.choices
    has_media = handoff is not None and handoff.multimodal_embedding_handles is not None
    found, encoders = "none" if handoff is None else "one", "none, or an encoder's multimodal_embedding_handles"
    if role == "encode":
        yield "role", role, "aggregated, prefill or decode: an encoder generates nothing", False
    elif role == "prefill":
        yield "disaggregated_params", found, encoders, handoff is None or has_media
        yield "n", n, "1 on a prefill worker: one answer is handed over", n == 1
    elif takes_transfer(request, role):
        allowed = "those of a prefill worker: decode mode requires them"
        yield "disaggregated_params", found, allowed, handoff is not None
        state, tokens = handoff and handoff.opaque_state, handoff and handoff.first_gen_tokens
        yield "disaggregated_params.first_gen_tokens", tokens, "one token or more", bool(tokens)
        yield "disaggregated_params.encoded_opaque_state", state, "what the prefill worker said, in base64", bool(state)
    else:
        allowed = f"{encoders}: this worker computes the prompt"
        yield "disaggregated_params", found, allowed, handoff is None or has_media
