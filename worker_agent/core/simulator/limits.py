"""What an engine can never serve, and therefore refuses at once: one rule a line, the first that is broken counts."""

from collections.abc import Iterator

from worker_agent.core.engine import PRIORITY_MAX, EngineDescription, EngineRequest, RequestRefused
from worker_agent.core.simulator.layout import CacheLayout
from worker_agent.core.simulator.windows import narrow_blocks_max

_Rule = tuple[str, object, str, bool]


def computed_tokens_max(request: EngineRequest) -> int:
    """Return how many tokens of a generation are ever computed: all but the last."""
    return len(request.prompt) + request.max_tokens - 1


def check_request(request: EngineRequest, engine: EngineDescription, layout: CacheLayout, *, id_in_use: bool) -> None:
    """Return where the engine can serve the request some day.

    Raises:
        RequestRefused: it cannot, on any of its ranks, however empty.
    """
    for field, found, allowed, is_allowed in _rules(request, engine, layout, id_in_use=id_in_use):
        if not is_allowed:
            raise RequestRefused(field, found, allowed)


def _rules(
    request: EngineRequest, engine: EngineDescription, layout: CacheLayout, *, id_in_use: bool
) -> Iterator[_Rule]:
    isl, osl, dp_rank, priority = len(request.prompt), request.max_tokens, request.dp_rank, request.priority
    yield "request_id", request.request_id, "an id that is not in use", not id_in_use
    yield "dp_rank", dp_rank, f"one of {engine.dp_ranks}", dp_rank is None or dp_rank in engine.dp_ranks
    yield "prompt", f"{isl} tokens", "1 token or more", isl > 0
    yield "max_tokens", osl, "1 or more", osl > 0
    yield "priority", priority, f"0..{PRIORITY_MAX}", 0 <= priority <= PRIORITY_MAX
    total = f"{isl} prompt tokens + max_tokens {osl}"
    yield "max_tokens", total, f"at most {engine.max_seq_len} together", isl + osl <= engine.max_seq_len
    tokens_max = computed_tokens_max(request)
    blocks, pool = -(-tokens_max // engine.block_size), engine.total_kv_blocks
    yield "max_tokens", f"{total} = {blocks} blocks", f"at most the pool's {pool} blocks", blocks <= pool
    for window in layout.narrow_windows:
        blocks, narrow = narrow_blocks_max(isl, tokens_max, window, engine.block_size), layout.narrow_blocks or pool
        allowed = f"at most the {narrow} blocks of window {window}'s pool"
        yield "max_tokens", f"{total} = {blocks} blocks", allowed, blocks <= narrow
