"""When an idle engine receives a canary request: a table over its state and its answers.

    fit,   an output of any generation within `wait_s`      no canary request
    fit,   no output for `wait_s`                           a canary request; the next one goes to the next rank
    unfit                                                   a canary request every `wait_s`, to the same rank
    an answer within its time                               fit
    no answer, a late one, an error                         unfit

Only an answered canary request makes an unfit engine fit again. Source: `docs/SOURCES.md` D6.6 (the begin
token, one token, temperature 0, top_k 1, a salt of its own, the highest priority).
"""

from typing import Literal

from worker_agent.port.sampling import Sampling
from worker_agent.port.types import EngineRequest

CanaryOutcome = Literal["ok", "failed", "late"]
OUTCOMES: tuple[CanaryOutcome, ...] = ("ok", "failed", "late")
SALT = "kvrouter-canary"
_HIGHEST = 1.0


class Canary:
    """One engine's fitness. Times are seconds of one clock; `now_s` at the start counts as an output."""

    def __init__(self, dp_ranks: tuple[int, ...], wait_s: float, now_s: float) -> None:
        self._dp_ranks, self._wait_s = dp_ranks, wait_s
        self._next_rank = 0
        self._last_s = now_s
        self.is_fit = True

    @property
    def dp_rank(self) -> int:
        """The rank of the next canary request."""
        return self._dp_ranks[self._next_rank % len(self._dp_ranks)]

    def on_output(self, now_s: float) -> None:
        """Note an output of any generation."""
        if self.is_fit:
            self._last_s = now_s

    def due_s(self, now_s: float) -> float:
        """Return the time until the next canary request; 0: now."""
        return max(0.0, self._last_s + self._wait_s - now_s)

    def on_answer(self, outcome: CanaryOutcome, now_s: float) -> None:
        """Note the outcome of the canary request to `dp_rank`."""
        self._last_s = now_s
        self.is_fit = outcome == "ok"
        if self.is_fit:
            self._next_rank += 1


def canary_request(request_id: str, begin_id: int, dp_rank: int, *, is_decode: bool) -> EngineRequest:
    """Return the canary request; a decode worker computes its prompt itself, without a handoff."""
    return EngineRequest(
        request_id=request_id,
        prompt=(begin_id,),
        max_tokens=1,
        dp_rank=dp_rank,
        cache_salt=SALT,
        sampling=Sampling(temperature=0.0, top_k=1),
        queue_priority=_HIGHEST,
        is_context_and_generation=is_decode,
    )
