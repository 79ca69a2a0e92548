"""Registers an attached engine while its HTTP `/health` answers.

The engine is probed every `PROBE_PERIOD_S`:

out, answers                             register
in,  answers                             nothing
in,  after a reconnection to the log     register: the log may be a new one
in,  failed `FAILURES_MAX` probes        leave
in,  sleeps                              leave at once: it answers /health and computes nothing
out, does not answer                     nothing

Before each registration the engine is queried again, for it may have restarted with another cache, and at each probe of
its models: it may have loaded an adapter.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from kv_protocol.fleet import WorkerRegistered
from kv_runtime.clock import Clock
from worker_agent.attached.client import EngineClient, EngineUnanswered
from worker_agent.fleet.membership import Membership

PROBE_PERIOD_S = 1.0
FAILURES_MAX = 5
_UNANSWERED = "its /health does not answer"

_log = structlog.get_logger("attached")

Describe = Callable[[bool], Awaitable[WorkerRegistered | None]]


class HealthWatch:
    """Probes the engine, registers it and withdraws it. `log_connections` counts the connections to the log.

    `describe(anew)` returns the current registration; None: the engine cannot join as it is. Unless `anew`, it may
    read names and adapters alone.
    """

    def __init__(
        self,
        client: EngineClient,
        membership: Membership,
        clock: Clock,
        *,
        log_connections: Callable[[], int],
        describe: Describe,
        is_asleep: Callable[[], bool],
    ) -> None:
        self._client, self._membership, self._describe = client, membership, describe
        self._clock, self._log_connections, self._log_seen = clock, log_connections, log_connections()
        self._is_asleep = is_asleep
        self.is_in = self._is_current = False
        """Whether the engine is registered; and whether that is in the present log."""
        self._failures, self._is_logged = 0, False

    async def run(self, stop: asyncio.Event) -> None:
        """Probe the engine until `stop` is set; then publish that it is draining."""
        while not stop.is_set():
            await self._probe()
            await self._clock.wait(stop, PROBE_PERIOD_S)
        if self.is_in:
            await self._membership.drain()

    async def leave(self, reason: str) -> None:
        """Publish that the engine left, if it was registered."""
        if self.is_in:
            await self._membership.leave(reason)

    async def _probe(self) -> None:
        before, self._log_seen = self._log_seen, self._log_connections()
        self._is_current = self._is_current and self._log_seen == before
        problem, is_asleep = "", self._is_asleep()
        try:
            await self._client.get("health", "/health")
        except EngineUnanswered as error:
            problem, is_asleep = str(error), False
        if is_asleep:
            problem = "it sleeps"
        self._failures = self._failures + 1 if problem else 0
        is_lost = is_asleep or self._failures >= FAILURES_MAX
        self._log_problem(problem)
        if not problem:
            registration = await self._describe(not self._is_current)
            if registration is not None and (self._membership.renew(registration) or not self._is_current):
                self._is_current = await self._membership.register() or self._is_current
                self.is_in = self.is_in or self._is_current
        elif self.is_in and is_lost and await self._membership.leave(problem if is_asleep else _UNANSWERED):
            self.is_in = self._is_current = False

    def _log_problem(self, problem: str) -> None:
        """Log once why the engine is not registered, or is about to leave, until it answers again."""
        is_out = bool(problem) and (not self.is_in or self._failures >= FAILURES_MAX)
        if is_out and not self._is_logged:
            _log.warning("engine_unreachable", url=f"{self._client.base_url}/health", reason=problem)
        self._is_logged = is_out
