"""A process of the event bench: an index that follows the log, and what is recorded of it after each message.

stamps        when each batch was delivered and applied
cold start    when the index had caught up, and when each rank was proven: a heartbeat at exactly its position was
              received, and the rank is not stale after it
"""

from bench.child import Answer, serve
from bench.events.run import LogRole
from bench.events.stages import BatchTimes
from bench.events.watch import AppliedMessage, WatchedLog
from indexer.embedded import EmbeddedIndex
from kv_protocol import codec, fleet, subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.supervise import Part

_POLL_S = 0.002
_KEEPER = "snapshots"
_EVENTS, _HEARTBEATS = "kv.v1.events.", "kv.v1.heartbeat."
_SEQ, _TIME_NS = 4, 6
"""Indexes into the head of a frame."""


class IndexRole(LogRole):
    """An index without its snapshot writer, which would start to write during a measurement."""

    _log: WatchedLog

    def __init__(self, *, url: str) -> None:
        super().__init__(url)
        self._is_watched = False
        self._batches: list[AppliedMessage] = []
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

    def _on_applied(self, applied: AppliedMessage) -> None:
        message, now_ns = applied.message, applied.applied_ns
        if message.subject.startswith(_EVENTS):
            self._applied_ns = now_ns
            if self._is_watched:
                self._batches.append(applied)
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
        size = sum(len(applied.message.data) for applied in self._batches)
        rows = [row for applied in self._batches for row in _rows(applied)]
        return {"rows": rows, "messages": len(self._batches), "bytes": size}

    async def reach(self, rank: str, epoch: int, seq: int) -> Answer:
        """Return when the last message was applied, once the rank is at this position."""
        worker_id, _, dp_rank = rank.partition("/")
        await self._index.wait_for(WorkerRank(worker_id, int(dp_rank)), epoch, seq)
        return {"applied_ns": self._applied_ns}

    async def proven(self, ranks: int) -> Answer:
        """Return when the index had caught up, and when the last of so many ranks was proven."""
        while len(self._proven_ns) < ranks:
            await self._clock.sleep(_POLL_S)
        return {
            "caught_up_ns": self._caught_up_ns,
            "proven_ns": max(self._proven_ns.values()),
            "held_blocks": self._index.statistics().index.held_blocks,
        }


def _rows(applied: AppliedMessage) -> list[BatchTimes]:
    message = applied.message
    return [
        BatchTimes(
            rank=str(subjects.rank_of(message.subject)),
            seq=frame.head[_SEQ],
            blocks=len(frame.hashes) // 8,
            made_ns=frame.head[_TIME_NS],
            stored_ns=message.time_ns,
            delivered_ns=applied.delivered_ns,
            applied_ns=applied.applied_ns,
        )
        for frame in codec.split_message(message.data)
    ]


if __name__ == "__main__":
    serve(IndexRole)
