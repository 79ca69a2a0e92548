"""Limits of any engine: the field, what was found, what is allowed."""

from collections.abc import Iterator

from worker_agent.engines.types import PRIORITY_MAX, EngineDescription, EngineRequest

Rule = tuple[str, object, str, bool]


def computed_tokens_max(request: EngineRequest) -> int:
    """Return the most tokens that a generation computes: all but the last."""
    return len(request.prompt) + request.max_tokens - 1


def limits(request: EngineRequest, engine: EngineDescription, *, id_in_use: bool) -> Iterator[Rule]:
    """Yield the rules that a request must pass with an empty pool. A pool of 0 blocks has an unknown size."""
    isl, osl, dp_rank, priority = len(request.prompt), request.max_tokens, request.dp_rank, request.priority
    yield "request_id", request.request_id, "an id that is not in use", not id_in_use
    yield "dp_rank", dp_rank, f"one of {engine.dp_ranks}", dp_rank is None or dp_rank in engine.dp_ranks
    yield "prompt", f"{isl} tokens", "1 token or more", isl > 0
    yield "max_tokens", osl, "1 or more", osl > 0
    yield "priority", priority, f"0..{PRIORITY_MAX}", 0 <= priority <= PRIORITY_MAX
    total = f"{isl} prompt tokens + max_tokens {osl}"
    yield "max_tokens", total, f"at most {engine.max_seq_len} together", isl + osl <= engine.max_seq_len
    blocks, pool = -(-computed_tokens_max(request) // engine.block_size), engine.total_kv_blocks
    allowed = f"at most the pool's {pool} blocks"
    yield "max_tokens", f"{total} = {blocks} blocks", allowed, not pool or blocks <= pool
