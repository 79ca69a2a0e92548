"""The worker's place in the fleet: registered while it is fit and serves, draining when asked to stop, then gone.

fit                       registered; again whenever the log was lost and found: it may be a new one
withdrawn                 left, with the reason; the other way round once it is restored
asked to stop             draining, where it is in
at the end                left
"""

import asyncio

import structlog

from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import until

_RETRY_S = 0.25
_RETRY_MAX_S = 5.0

_log = structlog.get_logger("membership")


class Membership:
    """One worker's fleet events. `news` is set by whoever finds the log again, and here."""

    def __init__(
        self,
        registration: WorkerRegistered,
        log: EventLog,
        clock: Clock,
        news: asyncio.Event,
        gate: FleetGate | None = None,
    ) -> None:
        """`gate` signs, if it has keys; None: nothing is signed."""
        self._registration = registration
        self._gate = FleetGate() if gate is None else gate
        self._event_log = log
        self._clock = clock
        self._news = news
        self._unfit = ""
        self._is_gone = False

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the fleet informed until `stop` is set; then say that the worker takes no new work."""
        while not stop.is_set():
            self._news.clear()
            await self._tell_soon(stop)
            await until(stop, self._news.wait())
        await (self.leave(self._unfit) if self._unfit else self.drain())

    def renew(self, registration: WorkerRegistered) -> None:
        """The worker, under the same name, life and model, is from now on what `registration` says."""
        self._registration = registration

    def withdraw(self, reason: str) -> None:
        """The fleet is soon told that the worker is gone; of several reasons the first counts."""
        self._unfit = self._unfit or reason
        self._news.set()

    def restore(self) -> None:
        """The worker is fit: the fleet is soon told that it serves."""
        self._unfit = ""
        self._news.set()

    async def register(self) -> bool:
        """Return whether the fleet was told that the worker serves."""
        is_told = await self._say(self._registration)
        if is_told:
            self._is_gone = False
            _log.info("worker_registered", worker=self._registration.worker_id, at=self._registration.base_url)
        return is_told

    async def drain(self) -> bool:
        """Return whether the fleet was told that the worker takes no new work."""
        worker_id, instance = self._registration.worker_id, self._registration.instance
        return await self._say(WorkerDraining(worker_id=worker_id, instance=instance))

    async def leave(self, reason: str) -> bool:
        """Return whether the fleet was told that the worker is gone; once, until it registers again."""
        if self._is_gone:
            return True
        worker_id, instance = self._registration.worker_id, self._registration.instance
        self._is_gone = await self._say(
            WorkerLeft(worker_id=worker_id, instance=instance, reason=self._unfit or reason)
        )
        return self._is_gone

    async def _tell_soon(self, stop: asyncio.Event) -> None:
        retry_s = _RETRY_S
        while not stop.is_set():
            if await (self.leave(self._unfit) if self._unfit else self.register()):
                return
            await until(stop, self._clock.sleep(retry_s))
            retry_s = min(2 * retry_s, _RETRY_MAX_S)

    async def _say(self, event: FleetEvent) -> bool:
        subject, data = subjects.fleet(self._registration.model, event.worker_id), fleet.encode(event)
        headers = self._gate.signed(subject, event.worker_id, data, self._clock.wall_ns())
        try:
            await self._event_log.publish(subject, data, headers=headers)
        except BrokerUnavailable as error:
            _log.warning("fleet_event_not_published", kind=type(event).__name__, reason=str(error))
            return False
        return True
