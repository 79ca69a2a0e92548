"""What the bench records of an index that follows the log: each observer gets every message after it was applied.

Stamps        when each batch was delivered and applied
ColdStart     when the index had caught up, and when each rank was proven: a heartbeat at exactly its position was
              received, and the rank is not stale after it
Recovering    one rank, from the message that showed an error to the one after which the rank is correct
"""

from typing import Any

from bench.events.stages import BatchTimes
from bench.events.watch import AppliedMessage
from indexer.embedded import EmbeddedIndex
from kv_protocol import codec, fleet, subjects
from kv_protocol.ids import WorkerRank

_EVENTS, _HEARTBEATS, _QUESTIONS, _ANSWERS = "kv.v1.events.", "kv.v1.heartbeat.", "kv.v1.recover.", "_INBOX."
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


class Recovering:
    """The recovery of one rank. `begin` resets the figures."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index
        self._rank: WorkerRank | None = None
        self.begin(None)

    def begin(self, rank: WorkerRank | None) -> None:
        """Observe `rank` from now on; None: observe no rank."""
        self._rank = rank
        self.detected_ns = self.current_ns = self.proven_ns = 0
        self.asked_bytes = self.answered_bytes = 0

    def on_announced(self, subject: str, data: bytes) -> None:
        """Count the bytes of a recovery request."""
        if subject.startswith(_QUESTIONS):
            self.asked_bytes += len(data)

    def on_applied(self, applied: AppliedMessage) -> None:
        """Record a message that was applied."""
        if self._rank is None:
            return
        message = applied.message
        if message.subject.startswith(_ANSWERS):
            self.answered_bytes += len(message.data)
        stale = self._index.overlap((), (self._rank,))[0].stale
        if not self.detected_ns:
            self.detected_ns = applied.delivered_ns if stale == "resyncing" else 0
        elif not stale and not self.current_ns:
            self.current_ns = applied.applied_ns
        if self.current_ns and not self.proven_ns and message.subject.startswith(_HEARTBEATS):
            is_its = subjects.rank_of(message.subject) == self._rank
            is_proof = is_its and is_at(self._index, self._rank, *_position_of(message.data))
            self.proven_ns = applied.applied_ns if is_proof else 0

    def figures(self) -> dict[str, Any]:
        """Return the figures of the recovery."""
        return {
            "seconds": (self.current_ns - self.detected_ns) / 1e9,
            "asked_bytes": self.asked_bytes,
            "answered_bytes": self.answered_bytes,
        }


def _position_of(heartbeat: bytes) -> tuple[int, int]:
    decoded = fleet.decode_heartbeat(heartbeat)
    return decoded.epoch, decoded.last_seq


def is_at(index: EmbeddedIndex, rank: WorkerRank, epoch: int, seq: int) -> bool:
    """Return whether the rank is at this position and not stale."""
    view = index.overlap((), (rank,))[0]
    return (view.epoch, view.seq, view.stale) == (epoch, seq, "")
