"""Reads the log for a survey: registrations, heartbeats, load reports, and how full its streams are."""

import msgspec

from kv_protocol import fleet, load, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from router.doctor.facts import StreamHead

HEADS_MAX = 65_536
"""Epochs of ranks, and ranks with load reports, that are kept; further ones are ignored."""
_POLL_S = 0.05


class LogWatch:
    """What the log's messages since `start` say; it lasts for one survey."""

    def __init__(self, log: EventLog, clock: Clock, gate: FleetGate | None = None) -> None:
        """`gate` checks fleet events; None: a gate without keys."""
        self._event_log, self._clock = log, clock
        self._gate = FleetGate() if gate is None else gate
        self._began_s = clock.now()
        self._heads = dict[tuple[WorkerRank, str, int], StreamHead]()
        self.used_blocks = dict[WorkerRank, int]()
        """By rank, the most used KV blocks that its engine reported."""
        self.events: dict[str, fleet.FleetEvent] = {}
        """The newest event of every worker, by its subject."""
        self.refused = ""
        """The subject of the newest refused fleet event, and the reason; empty: none was refused."""
        self.fills: dict[str, tuple[int, int]] = {}
        """By stream: its size and its limit in bytes; empty until `read_fills`."""

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
            await self._clock.sleep(_POLL_S)

    async def read_fills(self) -> None:
        """Read how full the log is; raise `BrokerUnavailable`."""
        self.fills = await fills(self._event_log)

    def heads(self) -> tuple[StreamHead, ...]:
        """Return every epoch of every rank with heartbeats."""
        return tuple(self._heads.values())

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            self.events[message.subject] = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused as error:
            self.refused = f"{message.subject}: {error}"

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            rank, beat = subjects.rank_of(message.subject), fleet.decode_heartbeat(message.data)
        except MalformedMessage:
            return
        key, now_s = (rank, beat.instance, beat.epoch), self._clock.now() - self._began_s
        known = self._heads.get(key)
        if known is None and len(self._heads) >= HEADS_MAX:
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
        except MalformedMessage:
            return
        if rank in self.used_blocks or len(self.used_blocks) < HEADS_MAX:
            self.used_blocks[rank] = max(report.used_blocks, self.used_blocks.get(rank, 0))


class _Config(msgspec.Struct, frozen=True):
    max_bytes: int


class _State(msgspec.Struct, frozen=True):
    bytes: int


class _StreamInfo(msgspec.Struct, frozen=True):
    config: _Config
    state: _State


class _Limits(msgspec.Struct, frozen=True):
    max_storage: int


class _Account(msgspec.Struct, frozen=True):
    storage: int
    limits: _Limits


async def fills(log: EventLog) -> dict[str, tuple[int, int]]:
    """Return size and limit, in bytes, of `KV_EVENTS` and of all streams of the account. A limit of 0 or less: none.

    Source: docs.nats.io, reference/jetstream/api: `$JS.API.INFO`, `$JS.API.STREAM.INFO.<stream>`.

    Raises:
        BrokerUnavailable: the server did not answer.
    """
    account = await log.answer_of("INFO", _Account)
    events = await log.answer_of(f"STREAM.INFO.{subjects.EVENTS_STREAM}", _StreamInfo)
    found = {} if account is None else {"the store": (account.storage, account.limits.max_storage)}
    return found if events is None else found | {subjects.EVENTS_STREAM: (events.state.bytes, events.config.max_bytes)}
