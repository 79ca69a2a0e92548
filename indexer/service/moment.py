"""The index at a past moment, with notes on what is uncertain about each rank.

    the rank                                              note
    ---------------------------------------------------   ----------------------------------------------------------
    is stale (resyncing)                                  the log lacks batches from its place on
    is at another place than the log brought it to        further: the snapshot has batches of an answer that the log
                                                            had not brought; less far: the snapshot lacked some
    is at the beginning of an epoch                       the snapshot has the epoch from a heartbeat; the log has
                                                            nothing of it yet, and may still have older batches
    was stale in the snapshot (resyncing, overfull,       the log does not show when that ended
      source), and has the same epoch

Without a note a rank's state is exactly the fold of all messages up to that moment.
"""

from collections.abc import Mapping
from typing import NamedTuple

from indexer.follow.checkpoint import RankCheckpoint
from indexer.follow.fold import IndexFold
from indexer.follow.status import FollowerStatistics
from kv_protocol.ids import WorkerRank

_NOT_HEALED_BY_THE_LOG = ("resyncing", "overfull", "source")


class Moment(NamedTuple):
    """The fold after message `stream_seq`, which the log stored at `time_ns`.

    It was made from the named snapshot (empty: none) with these rank checkpoints, and `messages_read` messages after.
    """

    fold: IndexFold
    stream_seq: int
    time_ns: int
    snapshot: str
    rank_checkpoints: Mapping[WorkerRank, RankCheckpoint]
    messages_read: int

    def notes(self) -> dict[WorkerRank, list[str]]:
        """Return the notes on each rank."""
        streams = self.fold.statistics().streams
        return {rank: _notes(stream, self.rank_checkpoints.get(rank)) for rank, stream in streams.items()}


def _notes(stream: FollowerStatistics, checkpoint: RankCheckpoint | None) -> list[str]:
    notes = []
    if stream.stale == "resyncing":
        notes.append(f"behind seq {stream.cursor} the log has a hole, or bytes that cannot be read")
    elif stream.stale:
        notes.append(stream.stale)
    elif not stream.cursor:
        notes.append("a heartbeat told the snapshot of this life, of which the log has nothing yet")
    elif stream.cursor > stream.logged_seq:
        ahead = stream.cursor - stream.logged_seq
        notes.append(f"ahead of the log by {ahead} batches, of which an answer told the snapshot")
    elif stream.cursor < stream.logged_seq:
        notes.append(f"the snapshot lacked {stream.logged_seq - stream.cursor} batches that the log had brought")
    if checkpoint is not None and checkpoint.stale in _NOT_HEALED_BY_THE_LOG and checkpoint.epoch == stream.epoch:
        notes.append(f"was stale in the snapshot: {checkpoint.stale}")
    return notes
