"""Subscribes to the log: registrations, heartbeats, load reports, unreadable messages."""

from kv_protocol import fleet, load, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from router.doctor.facts import LoadSeen, StreamHead

HEADS_MAX = 65_536
"""Epochs of ranks that are kept; of further ones only the fact that there are some."""
_REFUSED_MAX = 16
_LOOK_S = 0.05


class LogWatch:
    """Messages since `start`, for the duration of a survey."""

    def __init__(self, log: EventLog, clock: Clock, gate: FleetGate | None = None) -> None:
        """`gate` checks fleet events; None: a gate without keys."""
        self._event_log, self._clock = log, clock
        self._gate = FleetGate() if gate is None else gate
        self._began_s = clock.now()
        self._heads = dict[tuple[WorkerRank, str, int], StreamHead]()
        self._used = dict[WorkerRank, int]()
        self.events: dict[str, fleet.FleetEvent] = {}
        """The newest event of every worker, by its subject."""
        self.refused: list[str] = []

    async def start(self) -> None:
        """Subscribe to heartbeats and loads."""
        self._began_s = self._clock.now()
        await self._event_log.listen(subjects.HEARTBEAT_ALL, self._on_heartbeat)
        await self._event_log.listen(subjects.LOAD_ALL, self._on_load)

    async def read_fleet(self, timeout_s: float) -> None:
        """Read `KV_FLEET` completely, and subscribe to it.

        Raises:
            BrokerUnavailable: there is no such stream, or it was not read in time.
        """
        reading = await self._event_log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, self._on_fleet_event)
        ends_s = self._clock.now() + timeout_s
        while reading.unread:
            if self._clock.now() > ends_s:
                raise BrokerUnavailable(
                    f"{subjects.FLEET_STREAM}: {reading.unread} messages not read in {timeout_s:g} s"
                )
            await self._clock.sleep(_LOOK_S)

    def heads(self) -> tuple[StreamHead, ...]:
        """Return every epoch of every rank with heartbeats."""
        return tuple(self._heads.values())

    def loads(self) -> tuple[LoadSeen, ...]:
        """Return the highest load that every rank's engine reported."""
        return tuple(LoadSeen(rank, used) for rank, used in self._used.items())

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            self.events[message.subject] = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused as error:
            self._refuse(message, error)

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            rank, beat = subjects.rank_of(message.subject), fleet.decode_heartbeat(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        key, now_s = (rank, beat.instance, beat.epoch), self._clock.now() - self._began_s
        known = self._heads.get(key)
        if known is None and len(self._heads) >= HEADS_MAX:
            self._say(f"more than {HEADS_MAX} ranks beat: some are not looked at")
            return
        self._heads[key] = StreamHead(
            rank=rank,
            instance=beat.instance,
            epoch=beat.epoch,
            first_s=now_s if known is None else known.first_s,
            last_s=now_s,
            last_seq=beat.last_seq,
            stale=beat.stale,
        )

    async def _on_load(self, message: LogMessage) -> None:
        try:
            rank, report = subjects.rank_of(message.subject), load.decode_load(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        if rank in self._used or len(self._used) < HEADS_MAX:
            self._used[rank] = max(report.used_blocks, self._used.get(rank, 0))

    def _refuse(self, message: LogMessage, error: Exception) -> None:
        self._say(f"{message.subject}: {error}")

    def _say(self, words: str) -> None:
        if words not in self.refused and len(self.refused) < _REFUSED_MAX:
            self.refused.append(words)
