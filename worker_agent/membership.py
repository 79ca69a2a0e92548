"""The worker's place in the fleet: registered while it serves, draining when asked to stop, then gone.

The registration is put into the log again whenever the log was lost and found: it may be a new one.
"""

import asyncio

import structlog

from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import until

_RETRY_S = 0.25
_RETRY_MAX_S = 5.0

_log = structlog.get_logger("membership")


class Membership:
    """One worker's fleet events."""

    def __init__(self, registration: WorkerRegistered, log: EventLog, clock: Clock, log_found: asyncio.Event) -> None:
        self._registration = registration
        self._event_log = log
        self._clock = clock
        self._log_found = log_found

    async def run(self, stop: asyncio.Event) -> None:
        """Register, and again whenever the log was found anew; say `draining` once `stop` is set."""
        while not stop.is_set():
            self._log_found.clear()
            await self._register_soon(stop)
            await until(stop, self._log_found.wait())
        await self.drain()

    def renew(self, registration: WorkerRegistered) -> None:
        """The worker, under the same name, life and model, is from now on what `registration` says."""
        self._registration = registration

    async def register(self) -> bool:
        """Return whether the fleet was told that the worker serves."""
        is_told = await self._say(self._registration)
        if is_told:
            _log.info("worker_registered", worker=self._registration.worker_id, at=self._registration.base_url)
        return is_told

    async def drain(self) -> bool:
        """Return whether the fleet was told that the worker takes no new work."""
        worker_id, instance = self._registration.worker_id, self._registration.instance
        return await self._say(WorkerDraining(worker_id=worker_id, instance=instance))

    async def leave(self, reason: str) -> bool:
        """Return whether the fleet was told that the worker is gone."""
        worker_id, instance = self._registration.worker_id, self._registration.instance
        return await self._say(WorkerLeft(worker_id=worker_id, instance=instance, reason=reason))

    async def _register_soon(self, stop: asyncio.Event) -> None:
        retry_s = _RETRY_S
        while not stop.is_set():
            if await self.register():
                return
            await until(stop, self._clock.sleep(retry_s))
            retry_s = min(2 * retry_s, _RETRY_MAX_S)

    async def _say(self, event: FleetEvent) -> bool:
        subject = subjects.fleet(self._registration.model, event.worker_id)
        try:
            await self._event_log.publish(subject, fleet.encode(event))
        except BrokerUnavailable as error:
            _log.warning("fleet_event_not_published", kind=type(event).__name__, reason=str(error))
            return False
        return True
