"""The worker's membership: makes the newest fleet event of its id agree with the worker's state.

state        the newest fleet event
fit          the registration; published again once it was changed, overwritten, forged or purged, also in a new log
unfit        left, with the reason, if the worker was registered
stopping     draining, or left if it is unfit; neither if it never tried to register, or has left already
at the end   left
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
"""The longest wait for a fleet event of the id before the log is checked: no event announces a purge, or a new log."""
CHECK_PAUSE_S = 1.0
"""Least time between two checks: bounds how often forged fleet events make an agent publish."""
_RETRY_S = 0.25
_RETRY_MAX_S = 5.0

_log = structlog.get_logger("membership")


class Membership:
    """The fleet events of a worker that is fit until `withdraw`. `run` publishes its state, and each change at once."""

    def __init__(self, registration: WorkerRegistered, worker_id: WorkerId, clock: Clock) -> None:
        self._registration = registration
        self._worker_id = worker_id
        self._clock = clock
        self._changed = asyncio.Event()
        self._unfit = ""
        self._may_be_announced = False
        """Whether this object has tried to publish the registration, and has not published `WorkerLeft` since."""
        self.is_registered = False
        """Whether the registration was published or found in the log, and the worker has not been unfit since."""
        self.repairs_total = 0
        """How often the registration was not the newest fleet event of the id any more, and was published again."""

    async def run(self, stop: asyncio.Event) -> None:
        """Publish the worker's state until `stop` is set; then publish that it is draining, or that it left if unfit.

        Raises:
            WorkerIdTaken: another living instance has the id, and claimed it earlier.
        """
        retry_s = _RETRY_S
        while not stop.is_set():
            self._changed.clear()
            if await until(stop, self._publish_state()):
                retry_s, pause = _RETRY_S, self._next_check()
            else:
                retry_s, pause = min(2 * retry_s, _RETRY_MAX_S), self._clock.sleep(retry_s)
            await until(stop, until(self._changed, pause))
        own = self._registration
        draining = WorkerDraining(worker_id=own.worker_id, instance=own.instance)
        await (self.leave(self._unfit) if self._unfit else self._publish(draining))

    async def _next_check(self) -> None:
        await self._clock.sleep(CHECK_PAUSE_S)
        await self._clock.wait(self._worker_id.changed, CHECK_PERIOD_S)

    async def _publish_state(self) -> bool:
        """Make the log agree with the worker's state; return False if that failed."""
        if self._unfit:
            return await self.leave(self._unfit)
        self._may_be_announced = True
        try:
            self.repairs_total += await self._worker_id.register(self._registration)
        except BrokerUnavailable as error:
            _log.warning("fleet_event_not_published", kind="WorkerRegistered", reason=str(error))
            return False
        self.is_registered = not self._unfit
        return True

    def families(self) -> Iterator[Family]:
        """Yield the count of `repairs_total`."""
        meaning = "Times that the registration was published again: overwritten, forged, purged, or the log is new"
        yield counter("registration_repairs", meaning, (), [((), float(self.repairs_total))])

    def withdraw(self, reason: str) -> None:
        """Let `run` publish that the worker left; of several reasons the first counts."""
        self._unfit = self._unfit or reason
        self.is_registered = False
        self._changed.set()

    def restore(self, registration: WorkerRegistered | None = None) -> None:
        """Note that the worker is fit: `run` registers it, with `registration` if that is given (same instance)."""
        registration = registration or self._registration
        if self._unfit or registration != self._registration:
            self._registration, self._unfit = registration, ""
            self._changed.set()

    async def leave(self, reason: str) -> bool:
        """Publish that the worker left; return False if publishing failed. Others must not call it while `run` runs.

        Nothing is published unless `run` tried to register the worker since the start, or since it left. A reason that
        `withdraw` was given replaces `reason`.
        """
        own = self._registration
        left = WorkerLeft(worker_id=own.worker_id, instance=own.instance, reason=self._unfit or reason)
        self._may_be_announced = not await self._publish(left)
        return not self._may_be_announced

    async def _publish(self, event: FleetEvent) -> bool:
        if not self._may_be_announced:
            return True
        self.is_registered = False
        try:
            await self._worker_id.publish_event(self._registration.model, event)
        except BrokerUnavailable as error:
            _log.warning("fleet_event_not_published", kind=type(event).__name__, reason=str(error))
            return False
        return True
