"""Sends an idle engine a canary request now and then; an engine that fails it leaves the fleet until it answers one.

When a canary request is sent, and what its answer changes:

    fit,   an output of any generation within `wait_s`      no canary request
    fit,   no output for `wait_s`                           a canary request; the next one goes to the next rank
    unfit                                                   a canary request every `wait_s`, to the same rank
    an answer within `wait_s`                               fit
    no answer, a late one, an error                         unfit

Only an answered canary request makes an unfit engine fit again. Source: `docs/SOURCES.md` D6.6 (the begin
token, one token, temperature 0, top_k 1, a salt of its own, the highest priority).
"""

import asyncio
from collections import Counter
from contextlib import aclosing
from itertools import cycle
from typing import Literal

import structlog

from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from worker_agent.fleet.membership import Membership
from worker_agent.port.sampling import Sampling
from worker_agent.port.types import Engine, EngineError, EngineRequest

CanaryOutcome = Literal["ok", "failed", "late"]
OUTCOMES: tuple[CanaryOutcome, ...] = ("ok", "failed", "late")
SALT = "kvrouter-canary"
_HIGHEST = 1.0
BEGIN_ID = 1
"""The prompt for a model whose tokenizer has no begin token. Source: `docs/SOURCES.md` D6.6."""

_log = structlog.get_logger("canary")


class CanaryWatch:
    """Sends canary requests to an engine that has started, and withdraws and restores the worker by their outcome.

    Times are seconds of one clock; the watch's beginning counts as an output.
    """

    def __init__(self, engine: Engine, clock: Clock, *, wait_s: float, begin_id: int | None, is_decode: bool) -> None:
        self._engine, self._clock, self._wait_s, self._is_decode = engine, clock, wait_s, is_decode
        self._begin_id = BEGIN_ID if begin_id is None else begin_id
        self._dp_ranks, self._last_s = cycle(engine.describe().dp_ranks), clock.now()
        self._dp_rank = next(self._dp_ranks)  # of the next canary request
        self.is_fit = True
        self.requests_total: Counter[CanaryOutcome] = Counter(dict.fromkeys(OUTCOMES, 0))

    @property
    def due_s(self) -> float:
        """The time until the next canary request; 0: now."""
        return max(0.0, self._last_s + self._wait_s - self._clock.now())

    def on_output(self) -> None:
        """Note an output of a generation that a request asked for."""
        if self.is_fit:
            self._last_s = self._clock.now()

    async def run(self, membership: Membership, stop: asyncio.Event) -> None:
        """Send a canary request whenever one is due, until `stop` is set."""
        while not stop.is_set():
            if self.due_s > 0:
                await self._clock.wait(stop, self.due_s)
            elif (answered := await until(stop, self._probe())) is not None:
                self._judge(membership, *answered)

    async def _probe(self) -> tuple[CanaryOutcome, str]:
        """Send a canary request; return its outcome, and the reason of a failure."""
        request = EngineRequest(
            request_id=f"canary-{self.requests_total.total()}",
            prompt=(self._begin_id,),
            max_tokens=1,
            dp_rank=self._dp_rank,
            cache_salt=SALT,
            sampling=Sampling(passed={"temperature": 0.0, "top_k": 1}),
            queue_priority=_HIGHEST,
            is_context_and_generation=self._is_decode,  # a decode worker computes this prompt itself, without a handoff
        )
        try:
            async with asyncio.timeout(self._wait_s), aclosing(self._engine.generate(request)) as outputs:
                last = [output async for output in outputs][-1]
        except TimeoutError:
            return "late", f"no token within {self._wait_s} s"
        except EngineError as error:
            return "failed", str(error)
        return ("failed", "the generation failed") if last.finish_reason == "error" else ("ok", "")

    def _judge(self, membership: Membership, outcome: CanaryOutcome, reason: str) -> None:
        rank, was_fit = self._dp_rank, self.is_fit
        self.requests_total[outcome] += 1
        self.is_fit, self._last_s = outcome == "ok", self._clock.now()
        if self.is_fit:
            self._dp_rank = next(self._dp_ranks)
        if was_fit and not self.is_fit:
            _log.error("canary_failed", dp_rank=rank, outcome=outcome, reason=reason)
            membership.withdraw(f"canary at rank {rank}: {reason}")
        elif self.is_fit and not was_fit:
            _log.info("canary_answered", dp_rank=rank)
            membership.restore()
