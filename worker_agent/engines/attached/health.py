"""Registers an attached engine while its HTTP `/health` answers.

The table is in `attachment.py`. Before each registration, and every `DESCRIBE_PERIOD_S`, the engine is queried again:
it may have restarted with another cache, or loaded an adapter. An engine that sleeps leaves at once: it answers /health
and computes nothing. Source of the path: vLLM, SGLang and `trtllm-serve` all answer GET /health.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from kv_protocol.fleet import WorkerRegistered
from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from worker_agent.engines.attached.attachment import PROBE_PERIOD_S, Attachment
from worker_agent.engines.attached.client import EngineClient, EngineUnanswered
from worker_agent.fleet.membership import Membership

_log = structlog.get_logger("attached")

Describe = Callable[[], Awaitable[WorkerRegistered | None]]
DESCRIBE_PERIOD_S = 10.0


class HealthWatch:
    """Probes the engine, registers it and withdraws it. `log_found` is set after each reconnection to the log.

    `describe` returns the current registration; None: the engine cannot join as it is.
    """

    def __init__(
        self,
        client: EngineClient,
        membership: Membership,
        clock: Clock,
        log_found: asyncio.Event,
        *,
        describe: Describe | None = None,
        is_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client, self._membership, self._describe = client, membership, describe
        self._clock, self._log_found = clock, log_found
        self._is_asleep, self._described_s = is_asleep, clock.now()
        self._attachment = Attachment()
        self._is_logged = False

    @property
    def is_in(self) -> bool:
        """Whether the engine is registered."""
        return self._attachment.is_in

    async def run(self, stop: asyncio.Event) -> None:
        """Probe the engine until `stop` is set; then publish that it is draining."""
        while not stop.is_set():
            await self._probe()
            await until(stop, self._clock.sleep(PROBE_PERIOD_S))
        if self._attachment.is_in:
            await self._membership.drain()

    async def leave(self, reason: str) -> None:
        """Publish that the engine left, if it was registered."""
        if self._attachment.is_in:
            await self._membership.leave(reason)

    async def _probe(self) -> None:
        is_log_new = self._log_found.is_set()
        self._log_found.clear()
        problem = await self._problem()
        is_asleep = not problem and self._is_asleep()
        problem = "it sleeps" if is_asleep else problem
        step = self._attachment.on_probe(is_healthy=not problem, is_log_new=is_log_new, is_asleep=is_asleep)
        self._log_problem(problem)
        if step == "register" and await self._described() is not None and await self._membership.register():
            self._attachment.entered()
        elif step == "leave" and await self._membership.leave(problem if is_asleep else "its /health does not answer"):
            self._attachment.left()
        elif self._is_due() and await self._described():
            await self._membership.register()

    def _is_due(self) -> bool:
        return self._attachment.is_in and self._clock.now() >= self._described_s + DESCRIBE_PERIOD_S

    async def _described(self) -> bool | None:
        """Query the engine; return whether its registration differs from the last one; None: it cannot join."""
        if self._describe is None:
            return False
        self._described_s = self._clock.now()
        registration = await self._describe()
        return None if registration is None else self._membership.renew(registration)

    def _log_problem(self, problem: str) -> None:
        """Log once why the engine is not registered, or is about to leave, until it answers again."""
        is_out = bool(problem) and self._attachment.is_out
        if is_out and not self._is_logged:
            _log.warning("engine_unreachable", url=f"{self._client.base_url}/health", reason=problem)
        self._is_logged = is_out

    async def _problem(self) -> str:
        """Return why the engine is not healthy; empty when it is."""
        try:
            await self._client.get("health", "/health")
        except EngineUnanswered as error:
            return str(error)
        return ""
