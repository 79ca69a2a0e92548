"""Rules of each role for any engine: handoffs, transfers, choices.

    role                                  handoff                         choices    the prompt is computed
    aggregated                            an encoder's, or none           any        here
    prefill                               an encoder's, or none           1          here, and one token after it
    decode                                a prefill worker's, required    any        by that worker: its KV is fetched
    decode, `is_context_and_generation`   an encoder's, or none           any        here
    encode                                generates nothing: refused

Source: `docs/SOURCES.md` D4.2; NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py`.
"""

from collections.abc import Iterator

from worker_agent.api.request_limits import Rule
from worker_agent.engine_args.rules import Role
from worker_agent.engines.types import EngineRequest


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
