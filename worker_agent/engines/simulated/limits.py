"""Requests that an engine can never serve and refuses at once: one rule a line."""

from collections.abc import Iterator

from kv_protocol.fleet import Role
from worker_agent.engines.simulated.layout import CacheLayout
from worker_agent.engines.simulated.transfer import state_of
from worker_agent.engines.simulated.windows import narrow_blocks_max
from worker_agent.port.rules import Rule, computed_tokens_max, limits, role_rules, takes_transfer
from worker_agent.port.types import EngineDescription, EngineRequest, RequestRefused


def check_request(
    request: EngineRequest, engine: EngineDescription, layout: CacheLayout, role: Role, *, id_in_use: bool
) -> None:
    """Check that the engine can serve the request once it has room.

    Raises:
        RequestRefused: it cannot, on any of its ranks, however empty.
    """
    for field, found, allowed, is_allowed in _rules(request, engine, layout, role, id_in_use=id_in_use):
        if not is_allowed:
            raise RequestRefused(field, found, allowed)


def _rules(
    request: EngineRequest, engine: EngineDescription, layout: CacheLayout, role: Role, *, id_in_use: bool
) -> Iterator[Rule]:
    yield from role_rules(request, role)
    yield from limits(request, engine, id_in_use=id_in_use)
    yield "n", request.sampling.choices, "1 or more", request.sampling.choices >= 1
    if takes_transfer(request, role):
        yield from _handoff_rules(request)
    isl, pool, tokens_max = len(request.prompt), engine.total_kv_blocks, computed_tokens_max(request)
    total = f"{isl} prompt tokens + max_tokens {request.max_tokens}"
    for window in layout.narrow_windows:
        blocks, narrow = narrow_blocks_max(isl, tokens_max, window, engine.block_size), layout.narrow_blocks or pool
        allowed = f"at most the {narrow} blocks of window {window}'s pool"
        yield "max_tokens", f"{total} = {blocks} blocks", allowed, blocks <= narrow


def _handoff_rules(request: EngineRequest) -> Iterator[Rule]:
    """Yield the rules for a handoff: only a simulated prefill engine can have made it, and only for this prompt."""
    handoff, field = request.handoff, "disaggregated_params"
    assert handoff is not None
    tokens, name, endpoint = handoff.first_gen_tokens or (), handoff.ctx_request_id, handoff.ctx_info_endpoint
    n = request.sampling.choices
    yield "n", n, "1 beside a handoff: a context is fetched once", n == 1
    yield f"{field}.first_gen_tokens", tokens, "one token: prefill engines of this kind make one", len(tokens) == 1
    yield f"{field}.ctx_request_id", name, "the prefill engine's name of the context", name is not None
    yield f"{field}.ctx_info_endpoint", endpoint, "the prefill engine's address for fetching it", endpoint is not None
    is_ours = name is not None and handoff.opaque_state == state_of(request.prompt, name)
    yield f"{field}.encoded_opaque_state", "another", "a simulated prefill engine's state of this prompt", is_ours
