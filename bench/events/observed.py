"""Processes of the event bench that note when events are flushed and applied; and the ages that follow.

    SourceRole     an agent with an engine that reports blocks by a schedule. Poller, consolidator and log are real
    IndexRole      an index that follows the log: when each batch was applied, when the index had caught up, and when
                   each rank was proven: a heartbeat at exactly its position was received, and the rank is not stale
                   after it

Times are in nanoseconds since 1970.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple, cast

from bench.child import Answer
from bench.events.run import MODEL, EventLoad, Flush, LogRole, schedule
from bench.report import percentile
from indexer.embedded import EmbeddedIndex
from kv_protocol import codec, fleet, subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog, LogMessage, OnMessage, Reading
from kv_runtime.supervise import Part
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.consolidator import Consolidator, new_epoch
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import RankEvent
from worker_agent.events.source_poller import Source

_SOURCE_POLL_S, _INDEX_POLL_S = 0.05, 0.002
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
    """Return the age of each batch when it was applied, of those that the engine flushed from `since_ns` on.

    `flushed_ns`: by rank, of each event; batch n is event n - 1. Without them the age counts from when the payload was
    made.
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
        """Follow as the log does, and tell."""
        return await super().follow(stream, subject, self._watched(on_message), after_seq=after_seq, created=created)

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """Listen as the log does, and tell."""
        await super().listen(subject, self._watched(on_message))

    def _watched(self, on_message: OnMessage) -> OnMessage:
        async def watched(message: LogMessage) -> None:
            await on_message(message)
            self.on_applied(message)

        return watched


class TranslatedEvents(TrtllmRules):
    """The rules of a source that reports translated events."""

    def __init__(self) -> None:
        super().__init__(1)

    def translate(self, engine_events: object) -> list[RankEvent]:
        """Return the events as they are."""
        return cast("list[RankEvent]", engine_events)


class ScheduledEngine:
    """Reports its flushes when they are due; the polling thread calls `take`."""

    def __init__(self, flushes: list[Flush]) -> None:
        self._flushes = flushes
        self._at = 0
        self._begins_ns = 0
        self.flushed_ns: list[int] = []
        """When the engine flushed each event."""

    def begin(self, begins_ns: int) -> None:
        """Start the schedule at this moment; before, no flush is due."""
        self._begins_ns = begins_ns

    @property
    def is_over(self) -> bool:
        """Whether all flushes were reported."""
        return self._at == len(self._flushes)

    def take(self, timeout_s: float) -> list[RankEvent]:
        """Wait for the next flush, at most `timeout_s`; return the events of all flushes that are due."""
        time.sleep(min(self._wait_s(), timeout_s))
        taken: list[RankEvent] = []
        while self._wait_s() <= 0:
            flush = self._flushes[self._at]
            self.flushed_ns += [self._due_ns(flush)] * len(flush.events)
            taken += [RankEvent(0, event) for event in flush.events]
            self._at += 1
        return taken

    def _wait_s(self) -> float:
        if self.is_over or not self._begins_ns:
            return inf
        return max(0.0, self._due_ns(self._flushes[self._at]) - time.time_ns()) / 1e9

    def _due_ns(self, flush: Flush) -> int:
        return self._begins_ns + round(flush.after_s * 1e9)


class SourceRole(LogRole):
    """A worker of one rank; its engine computes `blocks_s` blocks a second of `load` after the command `play`."""

    def __init__(self, *, url: str, worker: str, load: dict[str, int], blocks_s: float) -> None:
        super().__init__(url)
        self._worker = worker
        self._load = EventLoad(**load)
        self._engine = ScheduledEngine(schedule(self._load, blocks_s))

    async def begin(self) -> Answer:
        """Connect the agent and prepare its parts."""
        self._log = await EventLog.connect(self._url, name=self._worker)
        core = Consolidation((0,), self._load.block_size, secrets.token_hex(4), new_epoch)
        self._path = Consolidator(
            core,
            [],
            self._log,
            self._clock,
            model=MODEL,
            worker_id=self._worker,
            source=Source(self._engine.take, TranslatedEvents()),
            poll_s=_SOURCE_POLL_S,
        )
        await self._path.start()
        return {}

    def parts(self) -> list[Part]:
        """Return the parts of the event path and of the connection."""
        return [*self._path.parts(1), Part("log", self._log.run, 6)]

    async def play(self, begins_ns: int) -> Answer:
        """Start the engine at that moment."""
        self._engine.begin(begins_ns)
        return {}

    async def played(self) -> Answer:
        """Wait until all is published; return when each event was flushed."""
        while not self._engine.is_over:
            await self._clock.sleep(_SOURCE_POLL_S)
        epoch, last_seq = (await self._path.position())[0]
        outbox = self._path.core.outboxes[0]
        while outbox.unacked_bytes:
            await self._clock.sleep(_SOURCE_POLL_S)
        assert last_seq == len(self._engine.flushed_ns), "an event is a batch"
        rank = WorkerRank(self._worker, 0)
        return {
            "rank": str(rank),
            "epoch": epoch,
            "last_seq": last_seq,
            "flushed_ns": self._engine.flushed_ns,
        }


class IndexRole(LogRole):
    """An index without its snapshot writer, which would start to write during a measurement."""

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
        self._log = await WatchedLog.connect(self._url, name="index")
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
            if rank not in self._proven_ns and self._is_at(rank, fleet.decode_heartbeat(message.data)):
                self._proven_ns[rank] = now_ns

    def _note_caught_up(self, now_ns: int) -> None:
        if not self._caught_up_ns and not self._index.catching_up():
            self._caught_up_ns = now_ns

    def _is_at(self, rank: WorkerRank, heartbeat: fleet.Heartbeat) -> bool:
        view = self._index.overlap((), (rank,))[0]
        return (view.epoch, view.seq, view.stale) == (heartbeat.epoch, heartbeat.last_seq, "")

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
        """Return when the last message was applied, once the rank is at this position."""
        worker_id, _, dp_rank = rank.partition("/")
        await self._index.wait_for(WorkerRank(worker_id, int(dp_rank)), epoch, seq)
        return {"applied_ns": self._applied_ns}

    async def proven(self, ranks: int) -> Answer:
        """Return when the index had caught up, and when the last of so many ranks was proven."""
        while len(self._proven_ns) < ranks:
            await self._clock.sleep(_INDEX_POLL_S)
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
