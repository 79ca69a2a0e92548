"""What an engine can never serve, and therefore refuses at once: one rule a line, the first that is broken counts."""

from collections.abc import Iterator

from worker_agent.core.engine import EngineDescription, EngineRequest, RequestRefused
from worker_agent.core.request_limits import Rule, computed_tokens_max, limits
from worker_agent.core.simulator.layout import CacheLayout
from worker_agent.core.simulator.windows import narrow_blocks_max


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
) -> Iterator[Rule]:
    yield from limits(request, engine, id_in_use=id_in_use)
    isl, pool, tokens_max = len(request.prompt), engine.total_kv_blocks, computed_tokens_max(request)
    total = f"{isl} prompt tokens + max_tokens {request.max_tokens}"
    for window in layout.narrow_windows:
        blocks, narrow = narrow_blocks_max(isl, tokens_max, window, engine.block_size), layout.narrow_blocks or pool
        allowed = f"at most the {narrow} blocks of window {window}'s pool"
        yield "max_tokens", f"{total} = {blocks} blocks", allowed, blocks <= narrow
