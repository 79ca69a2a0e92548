"""Sends an idle engine a canary request now and then; an engine that fails it leaves the fleet until it answers one.

`canary_rules.py` defines the request and its schedule.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from worker_agent.fleet.canary_rules import OUTCOMES, Canary, CanaryOutcome, canary_request
from worker_agent.fleet.membership import Membership
from worker_agent.port.engine import Engine
from worker_agent.port.types import EngineError, EngineOutput, EngineRequest

BEGIN_ID = 1
"""The prompt for a model whose tokenizer has no begin token. Source: `docs/SOURCES.md` D6.6."""

_log = structlog.get_logger("canary")


class MonitoredEngine:
    """Wraps an engine and reports each output to the canary; all served requests go through it."""

    def __init__(self, engine: Engine, canary: Canary, clock: Clock) -> None:
        self._engine, self._canary, self._clock = engine, canary, clock
        self.describe, self.start, self.run, self.stop = engine.describe, engine.start, engine.run, engine.stop
        self.kv_events, self.iteration_stats = engine.kv_events, engine.iteration_stats

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield the engine's outputs; see `Engine`."""
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                self._canary.on_output(self._clock.now())
                yield output


class CanaryWatch:
    """Sends canary requests, and withdraws and restores the worker by their outcome."""

    def __init__(
        self,
        engine: Engine,
        canary: Canary,
        membership: Membership,
        clock: Clock,
        *,
        timeout_s: float,
        begin_id: int | None,
        is_decode: bool,
    ) -> None:
        self._engine, self._canary, self._membership, self._clock = engine, canary, membership, clock
        self._timeout_s, self._is_decode = timeout_s, is_decode
        self._begin_id = BEGIN_ID if begin_id is None else begin_id
        self.requests_total: Counter[CanaryOutcome] = Counter(dict.fromkeys(OUTCOMES, 0))

    async def run(self, stop: asyncio.Event) -> None:
        """Send a canary request whenever one is due, until `stop` is set."""
        while not stop.is_set():
            due_s = self._canary.due_s(self._clock.now())
            if due_s > 0:
                await self._clock.wait(stop, due_s)
            elif (answered := await until(stop, self._probe())) is not None:
                self._judge(*answered)

    async def _probe(self) -> tuple[CanaryOutcome, str]:
        """Send a canary request; return its outcome, and the reason of a failure."""
        number = self.requests_total.total()
        request = canary_request(f"canary-{number}", self._begin_id, self._canary.dp_rank, is_decode=self._is_decode)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._await_answer(request)
        except TimeoutError:
            return "late", f"no token within {self._timeout_s} s"
        except EngineError as error:
            return "failed", str(error)
        return "ok", ""

    async def _await_answer(self, request: EngineRequest) -> None:
        async with aclosing(self._engine.generate(request)) as outputs:
            last = [output async for output in outputs][-1]
        if last.finish_reason == "error":
            raise EngineError("the generation failed")

    def _judge(self, outcome: CanaryOutcome, reason: str) -> None:
        rank, was_fit = self._canary.dp_rank, self._canary.is_fit
        self.requests_total[outcome] += 1
        self._canary.on_answer(outcome, self._clock.now())
        if was_fit and not self._canary.is_fit:
            _log.error("canary_failed", dp_rank=rank, outcome=outcome, reason=reason)
            self._membership.withdraw(f"canary at rank {rank}: {reason}")
        elif self._canary.is_fit and not was_fit:
            _log.info("canary_answered", dp_rank=rank)
            self._membership.restore()
