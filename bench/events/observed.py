"""An index of the event bench that notes when batches are applied; and the batches' ages.

    IndexRole      follows the log, and records when each batch was applied, when the index had caught up, and when
                   each rank was proven: a heartbeat at exactly its position was received, and the rank is not stale
                   after it

Times are in nanoseconds since 1970.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.child import Answer
from bench.events.run import LogRole
from bench.report import percentile
from indexer.embedded import EmbeddedIndex
from kv_protocol import codec, fleet, subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog, LogMessage, OnMessage, Reading
from kv_runtime.supervise import Part

_POLL_S = 0.002
_KEEPER = "snapshots"
_EVENTS, _HEARTBEATS = "kv.v1.events.", "kv.v1.heartbeat."


class BatchTimes(NamedTuple):
    """One batch as the index saw it: when its payload was made, and when it was applied."""

    rank: str
    seq: int
    blocks: int
    made_ns: int
    applied_ns: int


def ages_s(batches: Sequence[BatchTimes], flushed_ns: Mapping[str, Sequence[int]], since_ns: int = 0) -> list[float]:
    """Return the ages, when they were applied, of the batches that the engine flushed from `since_ns` on.

    `flushed_ns` has the time of each event's flush, by rank; the batch with `seq` n is event n - 1. If `flushed_ns` is
    empty, an age counts from when the payload was made.
    """
    begun = [flushed_ns[batch.rank][batch.seq - 1] if flushed_ns else batch.made_ns for batch in batches]
    return [(batch.applied_ns - at) / 1e9 for batch, at in zip(batches, begun, strict=True) if at >= since_ns]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and maximum in milliseconds; zeros without values."""
    of = {"p50": percentile(seconds, 0.50), "p99": percentile(seconds, 0.99), "max": max(seconds, default=0.0)}
    return {name: 1e3 * each for name, each in of.items()}


class WatchedLog(EventLog):
    """A connection to the log that calls `on_applied` after the consumer of each message has returned."""

    on_applied: Callable[[LogMessage], None]

    async def follow(
        self, stream: str, subject: str, on_message: OnMessage, *, after_seq: int = 0, created: str = ""
    ) -> Reading:
        """Follow as the log does, and call `on_applied`."""
        return await super().follow(stream, subject, self._watched(on_message), after_seq=after_seq, created=created)

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """Listen as the log does, and call `on_applied`."""
        await super().listen(subject, self._watched(on_message))

    def _watched(self, on_message: OnMessage) -> OnMessage:
        async def watched(message: LogMessage) -> None:
            await on_message(message)
            self.on_applied(message)

        return watched


class IndexRole(LogRole):
    """An index without its snapshot writer, which would start to write during a measurement."""

    LogType = WatchedLog
    _log: WatchedLog

    def __init__(self, *, url: str) -> None:
        super().__init__(url)
        self._is_watched = False
        self._messages: list[tuple[LogMessage, int]] = []
        """Messages of events, and when they were applied."""
        self._applied_ns = self._caught_up_ns = 0
        """When the last batches were applied, and when the index had caught up."""
        self._proven_ns: dict[WorkerRank, int] = {}

    async def begin(self) -> Answer:
        """Restore the snapshot, if there is one, and start to read the log."""
        await super().begin()
        self._index = EmbeddedIndex(IndexSection(), self._log, self._clock, NatsSection())
        self._log.on_applied = self._on_applied
        await self._index.start()
        self._note_caught_up(self._clock.wall_ns())
        return {}

    def parts(self) -> list[Part]:
        """Return the parts of the index without the snapshot writer."""
        return [part for part in self._index.parts(1) if part.name != _KEEPER]

    def _on_applied(self, message: LogMessage) -> None:
        now_ns = self._clock.wall_ns()
        if message.subject.startswith(_EVENTS):
            self._applied_ns = now_ns
            if self._is_watched:
                self._messages.append((message, now_ns))
        self._note_caught_up(now_ns)
        if self._caught_up_ns and message.subject.startswith(_HEARTBEATS):
            rank = subjects.rank_of(message.subject)
            beat, view = fleet.decode_heartbeat(message.data), self._index.overlap((), (rank,))[0]
            if (view.epoch, view.seq, view.stale) == (beat.epoch, beat.last_seq, ""):
                self._proven_ns.setdefault(rank, now_ns)

    def _note_caught_up(self, now_ns: int) -> None:
        if not self._caught_up_ns and not self._index.catching_up():
            self._caught_up_ns = now_ns

    async def watch(self) -> Answer:
        """Record batches from now on."""
        self._is_watched = True
        return {}

    async def recorded(self) -> Answer:
        """Return the recorded batches, the number of their messages, and the bytes of these."""
        size = sum(len(message.data) for message, _ in self._messages)
        rows = [row for applied in self._messages for row in _rows(*applied)]
        return {"rows": rows, "messages": len(self._messages), "bytes": size}

    async def reach(self, rank: str, epoch: int, seq: int) -> Answer:
        """Return the time of the last applied message, once the rank is at this position."""
        worker_id, _, dp_rank = rank.partition("/")
        await self._index.wait_for(WorkerRank(worker_id, int(dp_rank)), epoch, seq)
        return {"applied_ns": self._applied_ns}

    async def proven(self, ranks: int) -> Answer:
        """Return the times at which the index had caught up, and the last of `ranks` ranks was proven."""
        while len(self._proven_ns) < ranks:
            await self._clock.sleep(_POLL_S)
        return {
            "caught_up_ns": self._caught_up_ns,
            "proven_ns": max(self._proven_ns.values()),
            "held_blocks": self._index.statistics().index.held_blocks,
        }


def _rows(message: LogMessage, applied_ns: int) -> list[BatchTimes]:
    return [
        BatchTimes(
            rank=str(subjects.rank_of(message.subject)),
            seq=batch.seq,
            blocks=len(getattr(batch.event, "sequence_hashes", ())),
            made_ns=batch.engine_time_ns,
            applied_ns=applied_ns,
        )
        for batch in codec.decode_message(message.data)
    ]
