"""What the bench records of an index that follows the log: each observer gets every message after it was applied.

Stamps        when each batch was delivered and applied
ColdStart     when the index had caught up, and when each rank was proven: a heartbeat at exactly its position was
              received, and the rank is not stale after it
"""

from bench.events.stages import BatchTimes
from bench.events.watch import AppliedMessage
from indexer.embedded import EmbeddedIndex
from kv_protocol import codec, fleet, subjects
from kv_protocol.ids import WorkerRank

_EVENTS, _HEARTBEATS = "kv.v1.events.", "kv.v1.heartbeat."
_SEQ, _TIME_NS = 4, 6
"""Indexes into the head of a frame."""


class Stamps:
    """When each batch was delivered and applied, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.applied_ns = 0
        """When the last message was applied."""
        self._applied: list[AppliedMessage] = []

    def on_applied(self, applied: AppliedMessage) -> None:
        """Record a message that was applied."""
        if applied.message.subject.startswith(_EVENTS):
            self.applied_ns = applied.applied_ns
            if self.is_on:
                self._applied.append(applied)

    def rows(self) -> list[BatchTimes]:
        """Return all recorded batches."""
        return [
            BatchTimes(
                rank=str(subjects.rank_of(applied.message.subject)),
                seq=frame.head[_SEQ],
                blocks=len(frame.hashes) // 8,
                made_ns=frame.head[_TIME_NS],
                stored_ns=applied.message.time_ns,
                delivered_ns=applied.delivered_ns,
                applied_ns=applied.applied_ns,
            )
            for applied in self._applied
            for frame in codec.split_message(applied.message.data)
        ]

    def messages(self) -> tuple[int, int]:
        """Return the number of recorded messages and their bytes."""
        return len(self._applied), sum(len(applied.message.data) for applied in self._applied)


class ColdStart:
    """When the index had caught up, and when each rank was proven since."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index
        self.caught_up_ns = 0
        self.proven_ns: dict[WorkerRank, int] = {}

    def note_caught_up(self, now_ns: int) -> None:
        """Record the time if the index has caught up."""
        if not self.caught_up_ns and not self._index.catching_up():
            self.caught_up_ns = now_ns

    def on_applied(self, applied: AppliedMessage) -> None:
        """Record a message that was applied."""
        self.note_caught_up(applied.applied_ns)
        message = applied.message
        if self.caught_up_ns and message.subject.startswith(_HEARTBEATS):
            rank = subjects.rank_of(message.subject)
            if rank not in self.proven_ns and is_at(self._index, rank, *_position_of(message.data)):
                self.proven_ns[rank] = applied.applied_ns


def _position_of(heartbeat: bytes) -> tuple[int, int]:
    decoded = fleet.decode_heartbeat(heartbeat)
    return decoded.epoch, decoded.last_seq


def is_at(index: EmbeddedIndex, rank: WorkerRank, epoch: int, seq: int) -> bool:
    """Return whether the rank is at this position and not stale."""
    view = index.overlap((), (rank,))[0]
    return (view.epoch, view.seq, view.stale) == (epoch, seq, "")
