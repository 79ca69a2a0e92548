"""Fleet events, heartbeats and load reports into the router's state; the log's connection and time as well."""

import asyncio

import structlog

from kv_protocol import fleet, load, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LoadApplied, LogConnection, WorkerHeard
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.supervise import until
from router.core.state import RouterState

TICK_S = 0.25

_log = structlog.get_logger("router")


class RouterFeeds:
    """Keeps one state true to one log; parts of a process: `run` lets time pass."""

    def __init__(self, state: RouterState, log: EventLog, clock: Clock) -> None:
        self._state, self._event_log, self._clock = state, log, clock
        self._was_connected = True
        self.refused_messages_total = 0

    async def start(self) -> None:
        """The log is being read."""
        await self._event_log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, self._on_fleet_event)
        await self._event_log.listen(subjects.HEARTBEAT_ALL, self._on_heartbeat)
        await self._event_log.listen(subjects.LOAD_ALL, self._on_load)

    async def run(self, stop: asyncio.Event) -> None:
        """Let time pass until `stop` is set."""
        while not stop.is_set():
            now_s, connected = self._clock.now(), self._event_log.is_connected
            if connected != self._was_connected:
                self._was_connected = connected
                self._state.apply(LogConnection(now_s=now_s, heard=connected))
            for record in self._state.tick(now_s):
                _log.warning("lease_expired", record=str(record))
                self._state.apply(record)
            await until(stop, self._clock.sleep(TICK_S))

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            event = fleet.decode_fleet_event(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        now_s = self._clock.now()
        self._state.apply(FleetApplied(now_s=now_s, event=event))
        worker = self._state.fleet.worker(event.worker_id)
        _log.info("fleet_event", kind=type(event).__name__, worker=event.worker_id, instance=event.instance)
        if isinstance(event, WorkerRegistered) and worker is not None:
            hashing = self._state.fleet.hashing(event.model, now_s) or Hashing(event.block_size)
            if disparity := self._state.fleet.disparity(worker, hashing):
                _log.error("worker_differs", worker=event.worker_id, difference=disparity)

    async def _on_heartbeat(self, message: LogMessage) -> None:
        if (rank := self._rank_of(message)) is None:
            return
        try:
            heartbeat = fleet.decode_heartbeat(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        now_s = self._clock.now()
        self._state.apply(WorkerHeard(now_s=now_s, worker_id=rank.worker_id, instance=heartbeat.instance))

    async def _on_load(self, message: LogMessage) -> None:
        if (rank := self._rank_of(message)) is None:
            return
        try:
            report = load.decode_load(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        self._state.apply(
            LoadApplied(now_s=self._clock.now(), worker_id=rank.worker_id, dp_rank=rank.dp_rank, report=report)
        )

    def _rank_of(self, message: LogMessage) -> WorkerRank | None:
        try:
            return subjects.rank_of(message.subject)
        except MalformedMessage as error:
            self._refuse(message, error)
            return None

    def _refuse(self, message: LogMessage, error: Exception) -> None:
        self.refused_messages_total += 1
        _log.warning("message_refused", subject=message.subject, reason=str(error))
