"""The worker's membership: registered while fit, draining at the stop, then left.

fit                       registered; again after every reconnection, because the log may be a new one
registration lost         registered again: it was overwritten, forged or purged (`worker_id_rules.py`)
withdrawn                 left, with the reason; registered again once it is restored
stopping                  draining, or left if it is unfit; neither if it never tried to register, or has left already
at the end                left
"""

import asyncio
from collections.abc import Iterator

import structlog

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, counter
from worker_agent.fleet.worker_id import WorkerId

CHECK_PERIOD_S = 5.0
"""The longest wait for a fleet event of the id before the registration is checked: no event announces a purge."""
REPAIR_PAUSE_S = 1.0
"""Least time between two checks: bounds how often forged fleet events make an agent publish."""
_RETRY_S = 0.25
_RETRY_MAX_S = 5.0

_log = structlog.get_logger("membership")


class Membership:
    """One worker's fleet events.

    `run` publishes the worker's state again when `news` is set. The caller sets it after each reconnection to the log;
    `withdraw` and `restore` set it, too.
    """

    def __init__(self, registration: WorkerRegistered, worker_id: WorkerId, clock: Clock, news: asyncio.Event) -> None:
        self._registration = registration
        self._worker_id = worker_id
        self._clock = clock
        self._news = news
        self._publishing = asyncio.Lock()
        self._unfit = ""
        self._may_be_announced = False
        """Whether this object has tried to publish the registration, and has not published `WorkerLeft` since."""
        self.is_registered = False
        """Whether this object has published the registration, and has not since tried to publish another state."""
        self.repairs_total = 0
        """How often the registration was not the newest fleet event of the id, and was published again."""

    async def run(self, stop: asyncio.Event) -> None:
        """Publish the worker's state until `stop` is set; then publish that it is draining, or that it left if unfit.

        Raises:
            WorkerIdTaken: another living instance has the id.
        """
        while not stop.is_set():
            self._news.clear()
            await self._publish_with_retries(stop)
            await until(stop, self._news.wait())
        await (self.leave(self._unfit) if self._unfit else self.drain())

    async def watch(self, stop: asyncio.Event) -> None:
        """Publish the registration again whenever it was overwritten, forged or purged, until `stop` is set.

        Nothing is published while the worker is not registered.

        Raises:
            WorkerIdTaken: another living instance has the id, and claimed it earlier.
        """
        while not stop.is_set():
            await until(stop, self._check_when_due())

    async def _check_when_due(self) -> None:
        await self._clock.wait(self._worker_id.changed, CHECK_PERIOD_S)
        await self._repair()
        await self._clock.sleep(REPAIR_PAUSE_S)

    async def _repair(self) -> None:
        async with self._publishing:
            if not self.is_registered:
                self._worker_id.changed.clear()
                return
            try:
                if not await self._worker_id.is_newest(self._registration):
                    await self._worker_id.register(self._registration)
                    self.repairs_total += 1
                    _log.warning("worker_registered_again", worker=self._registration.worker_id)
            except BrokerUnavailable as error:
                _log.warning("registration_not_checked", reason=str(error))

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        meaning = "Times that the registration was published again because it was overwritten, forged or purged"
        yield counter("registration_repairs", meaning, (), [((), float(self.repairs_total))])

    def renew(self, registration: WorkerRegistered) -> bool:
        """Replace the registration, without publishing it; return whether the new one differs from the old one.

        Both have the same worker id, instance and model.
        """
        before, self._registration = self._registration, registration
        return registration != before

    def withdraw(self, reason: str) -> None:
        """Let `run` publish that the worker left; of several reasons the first counts."""
        self._unfit = self._unfit or reason
        self._news.set()

    def restore(self) -> None:
        """Let `run` register the worker, which is fit again."""
        self._unfit = ""
        self._news.set()

    async def register(self) -> bool:
        """Publish the registration; return whether that worked. Raise `WorkerIdTaken` if another has the id."""
        async with self._publishing:
            self._may_be_announced = True
            try:
                await self._worker_id.register(self._registration)
            except BrokerUnavailable as error:
                _log.warning("fleet_event_not_published", kind="WorkerRegistered", reason=str(error))
                return False
            self.is_registered = True
        _log.info("worker_registered", worker=self._registration.worker_id, at=self._registration.base_url)
        return True

    async def drain(self) -> bool:
        """Publish that the worker is draining; return False if publishing failed.

        Nothing is published unless `register` was called since the start, or since the worker left.
        """
        own = self._registration
        return await self._publish(WorkerDraining(worker_id=own.worker_id, instance=own.instance))

    async def leave(self, reason: str) -> bool:
        """Publish that the worker left; return False if publishing failed.

        Nothing is published unless `register` was called since the start, or since the worker left. A reason that
        `withdraw` was given replaces `reason`.
        """
        own = self._registration
        left = WorkerLeft(worker_id=own.worker_id, instance=own.instance, reason=self._unfit or reason)
        self._may_be_announced = not await self._publish(left)
        return not self._may_be_announced

    async def _publish_with_retries(self, stop: asyncio.Event) -> None:
        retry_s = _RETRY_S
        while not stop.is_set():
            if await (self.leave(self._unfit) if self._unfit else self.register()):
                return
            await self._clock.wait(stop, retry_s)
            retry_s = min(2 * retry_s, _RETRY_MAX_S)

    async def _publish(self, event: FleetEvent) -> bool:
        if not self._may_be_announced:
            return True
        async with self._publishing:
            self.is_registered = False
            try:
                await self._worker_id.publish_event(self._registration.model, event)
            except BrokerUnavailable as error:
                _log.warning("fleet_event_not_published", kind=type(event).__name__, reason=str(error))
                return False
        return True
