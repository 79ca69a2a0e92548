"""The ranks that should be in an index, by the log alone: registered ranks, and ranks with heartbeats.

Each comes with its model's slug, which addresses its mirror. A worker that left is not included. A worker that died
without leaving is still registered; its mirror does not answer.
"""

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage

LISTEN_S = 1.5 * HEARTBEAT_PERIOD_S
"""Every live rank sends at least one heartbeat in this time."""
_POLL_S = 0.05


class FleetRoll:
    """The ranks of a fleet."""

    def __init__(self, log: EventLog, clock: Clock, gate: FleetGate | None = None) -> None:
        """`gate` checks fleet events; None: a gate without keys."""
        self._event_log, self._clock = log, clock
        self._gate = FleetGate() if gate is None else gate
        self._registered: dict[str, dict[WorkerRank, str]] = {}
        self.beating: dict[WorkerRank, str] = {}
        """The ranks that sent a heartbeat so far, and their models' slugs."""

    async def call(self, timeout_s: float) -> dict[WorkerRank, str]:
        """Return every rank and its model's slug, after `LISTEN_S`.

        Raises:
            BrokerUnavailable: the log is away, has no streams, or its fleet could not be read in `timeout_s`.
        """
        reading = await self._event_log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, self._on_fleet_event)
        await self._event_log.listen(subjects.HEARTBEAT_ALL, self._on_heartbeat)
        await self._clock.sleep(LISTEN_S)
        ends_s = self._clock.now() + timeout_s
        while reading.unread:
            if self._clock.now() > ends_s:
                raise BrokerUnavailable(f"{subjects.FLEET_STREAM}: {reading.unread} messages not read")
            await self._clock.sleep(_POLL_S)
        await self._event_log.leave(reading)
        registered = {rank: slug for ranks in self._registered.values() for rank, slug in ranks.items()}
        return registered | self.beating

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            event = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused:
            return  # a live worker is found by its heartbeat
        if isinstance(event, WorkerRegistered):
            self._registered[event.worker_id] = dict.fromkeys(event.ranks, subjects.slug_of(message.subject))
        elif isinstance(event, WorkerLeft):
            self._registered.pop(event.worker_id, None)

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            rank = subjects.rank_of(message.subject)
        except MalformedMessage:
            return
        self.beating[rank] = subjects.slug_of(message.subject)
