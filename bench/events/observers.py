"""What the bench notes of an index while it follows the log: each hears of every message after it was applied.

Stamps        when each batch came, and was applied
ColdStart     when the index had caught up, and when each rank was proven: a heartbeat at its very place was heard,
              and nothing speaks against the rank after it
Recovering    one rank, from the message that showed that something is wrong to the one after which nothing is
"""

from typing import Any

from bench.events.stages import BatchTimes
from bench.events.watch import AppliedMessage
from indexer.embedded import EmbeddedIndex
from kv_protocol import codec, fleet, subjects
from kv_protocol.ids import WorkerRank

_EVENTS, _HEARTBEATS, _QUESTIONS, _ANSWERS = "kv.v1.events.", "kv.v1.heartbeat.", "kv.v1.recover.", "_INBOX."
_SEQ, _TIME_NS = 4, 6
"""Where a frame's head has them."""


class Stamps:
    """When each batch came, once `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.applied_ns = 0
        """When the last message was applied."""
        self._applied: list[AppliedMessage] = []

    def on_applied(self, applied: AppliedMessage) -> None:
        """A message was applied."""
        if applied.message.subject.startswith(_EVENTS):
            self.applied_ns = applied.applied_ns
            if self.is_on:
                self._applied.append(applied)

    def rows(self) -> list[BatchTimes]:
        """Return all batches that came."""
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
        """Return how many messages came, and their bytes."""
        return len(self._applied), sum(len(applied.message.data) for applied in self._applied)


class ColdStart:
    """When the index had caught up, and which ranks were proven since, and when."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index
        self.caught_up_ns = 0
        self.proven_ns: dict[WorkerRank, int] = {}

    def note_caught_up(self, now_ns: int) -> None:
        """Note whether it has caught up."""
        if not self.caught_up_ns and not self._index.catching_up():
            self.caught_up_ns = now_ns

    def on_applied(self, applied: AppliedMessage) -> None:
        """A message was applied."""
        self.note_caught_up(applied.applied_ns)
        message = applied.message
        if self.caught_up_ns and message.subject.startswith(_HEARTBEATS):
            rank = subjects.rank_of(message.subject)
            if rank not in self.proven_ns and is_at(self._index, rank, *_position_of(message.data)):
                self.proven_ns[rank] = applied.applied_ns


class Recovering:
    """One rank's recovery. `begin` forgets the one before."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index
        self._rank: WorkerRank | None = None
        self.begin(None)

    def begin(self, rank: WorkerRank | None) -> None:
        """From now on `rank` is looked at; None: nobody is."""
        self._rank = rank
        self.detected_ns = self.current_ns = self.proven_ns = 0
        self.asked_bytes = self.answered_bytes = 0

    def on_announced(self, subject: str, data: bytes) -> None:
        """Something was announced."""
        if subject.startswith(_QUESTIONS):
            self.asked_bytes += len(data)

    def on_applied(self, applied: AppliedMessage) -> None:
        """A message was applied."""
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
        """Return what was seen."""
        return {
            "seconds": (self.current_ns - self.detected_ns) / 1e9,
            "asked_bytes": self.asked_bytes,
            "answered_bytes": self.answered_bytes,
        }


def _position_of(heartbeat: bytes) -> tuple[int, int]:
    figures = fleet.decode_heartbeat(heartbeat)
    return figures.epoch, figures.last_seq


def is_at(index: EmbeddedIndex, rank: WorkerRank, epoch: int, seq: int) -> bool:
    """Return whether the rank's place is this one, and nothing speaks against it."""
    view = index.overlap((), (rank,))[0]
    return (view.epoch, view.seq, view.stale) == (epoch, seq, "")
