"""The handover of computed prompts between simulated engines.

A prefill engine holds a context, a computed prompt with its blocks, until its KV was fetched:

    hold        returns a name: the request's `transfer_id`, else the next free number of this engine
    holds       whether a name and its handoff's state are those of a held context
    give_up     ends the hold: the context was fetched
    expired     contexts that were not fetched within `timeout_s` from the beginning of their last iteration
"""

from itertools import chain, repeat
from typing import NamedTuple

from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.scheduling import RunningRequest
from worker_agent.engines.simulated.transfer import Fetch, state_of
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs
from worker_agent.port.types import EngineOutput


class HeldContext(NamedTuple):
    """A computed prompt, its blocks at a rank, and the state that a fetch must present."""

    dp_rank: int
    table: BlockTable
    prompt: tuple[int, ...]
    state: bytes
    until_s: float


class HeldContexts:
    """The contexts of all ranks of one engine; the ranks' blocks bound their number."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[int, HeldContext] = {}
        self._number = 0
        self.endpoint: str | None = None
        """The address to fetch them from, which handoffs name once it is known."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """How many tokens' KV is held."""
        return sum(len(each.prompt) for each in self._held.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When the next one expires, in engine seconds; None if none is held."""
        return min((each.until_s for each in self._held.values()), default=None)

    def count_at(self, dp_rank: int) -> int:
        """Return how many a rank holds."""
        return sum(each.dp_rank == dp_rank for each in self._held.values())

    def hold(
        self, dp_rank: int, table: BlockTable, prompt: tuple[int, ...], now_s: float, transfer_id: int | None
    ) -> tuple[int, bytes]:
        """Return the context's name, not in use before, and its state."""
        while transfer_id is None or transfer_id in self._held:
            self._number += 1
            transfer_id = self._number
        state = state_of(prompt, transfer_id)
        self._held[transfer_id] = HeldContext(dp_rank, table, prompt, state, now_s + self._timeout_s)
        return transfer_id, state

    def holds(self, transfer_id: int, state: bytes, tokens: int) -> bool:
        """Return whether so many tokens of the context are held."""
        held = self._held.get(transfer_id)
        return held is not None and held.state == state and 0 < tokens <= len(held.prompt)

    def give_up(self, transfer_id: int) -> HeldContext | None:
        """Remove and return the context, whose blocks the caller releases; None if it is not held."""
        return self._held.pop(transfer_id, None)

    def expired(self, now_s: float) -> list[HeldContext]:
        """Remove and return the contexts that were not fetched in time, likewise."""
        late = [name for name, each in self._held.items() if each.until_s <= now_s]
        return [self._held.pop(name) for name in late]


def context_handoff(
    running: RunningRequest, logprobs: tuple[TokenLogprobs | None, ...], name: int, state: bytes
) -> Handoff:
    """Return the handoff of a computed prompt, held as context `name`, with the token after it."""
    top_logprobs = [each.top or (each.chosen,) for each in logprobs if each is not None]
    return Handoff(
        request_type="context_only",
        first_gen_tokens=running.unreported,
        first_gen_log_probs=tuple(top_logprobs) or None,
        ctx_request_id=name,
        disagg_request_id=running.request.transfer_id,
        opaque_state=state,
    )


def fetch_of(running: RunningRequest) -> Fetch:
    """Return the fetch of an admitted request: the KV of all tokens that the engine has not cached."""
    request, handoff = running.request, running.request.handoff
    assert handoff is not None
    return Fetch(
        request_id=request.request_id,
        transfer_id=handoff.ctx_request_id or 0,
        state=handoff.opaque_state or b"",
        tokens=len(request.prompt) - running.cached_tokens,
        endpoint=handoff.ctx_info_endpoint or "",
    )


def resume_after_first_tokens(running: RunningRequest) -> None:
    """Continue a request from the handoff's first tokens, which are not reported yet."""
    handoff = running.request.handoff
    running.unreported = (handoff and handoff.first_gen_tokens) or ()
    running.tokens += running.unreported
    running.prefix_state = running.source.fold(running.unreported, running.prefix_state)


def failed_output(running: RunningRequest) -> EngineOutput:
    """Return the only output of a request whose KV did not come."""
    return EngineOutput(token_ids=(), cached_tokens=running.cached_tokens, finish_reason="error")


def first_logprobs(running: RunningRequest) -> tuple[TokenLogprobs | None, ...]:
    """Return the log probabilities of the handoff's first tokens, which are not reported yet."""
    top, handoff = running.request.sampling.logprobs, running.request.handoff
    if top is None or handoff is None or not running.unreported:
        return ()
    reported = handoff.first_gen_log_probs or ()
    return tuple(
        _first_logprob(token, alternatives, top)
        for token, alternatives in zip(running.unreported, chain(reported, repeat(None)), strict=False)
    )


def _first_logprob(token: int, alternatives: tuple[TokenLogprob, ...] | float | None, top: int) -> TokenLogprobs | None:
    if isinstance(alternatives, float):
        return TokenLogprobs(chosen=TokenLogprob(token_id=token, logprob=alternatives))
    chosen = next((each for each in alternatives or () if each.token_id == token), None)
    return None if chosen is None else TokenLogprobs(chosen=chosen, top=(alternatives or ())[:top])
