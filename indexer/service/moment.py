"""The index at a moment of the past, with what is uncertain about each rank.

    the rank                                              note
    ---------------------------------------------------   ----------------------------------------------------------
    is stale (resyncing)                                  the log does not tell all of it from its place on
    is at another place than the log has brought it to    further: an answer told the snapshot of batches that the
                                                            log had not brought; less far: the snapshot lacked some
    is at the beginning of its life                       a heartbeat told the snapshot of that life; the log says
                                                            nothing of it yet, and may still tell of the one before
    was stale in the snapshot (resyncing, overfull,       it was so then, and the log does not say when that ended
      source), and has the same epoch

Without a note what is said of a rank is what all messages up to that moment make, and nothing else.
"""

from collections.abc import Mapping
from typing import NamedTuple

from indexer.follow.checkpoint import RankCheckpoint
from indexer.follow.fold import IndexFold
from indexer.follow.status import FollowerStatistics
from kv_protocol.ids import WorkerRank

_NOT_HEALED_BY_THE_LOG = ("resyncing", "overfull", "source")


class Moment(NamedTuple):
    """The fold after message `stream_seq`, which the log took at `time_ns`.

    It was made from the snapshot of that name (empty: of none), where the ranks had these places, and `messages_read`
    messages behind it.
    """

    fold: IndexFold
    stream_seq: int
    time_ns: int
    snapshot: str
    places: Mapping[WorkerRank, RankCheckpoint]
    messages_read: int

    def notes(self) -> dict[WorkerRank, list[str]]:
        """Return what is to be said of each rank."""
        return {rank: _notes(stream, self.places.get(rank)) for rank, stream in self.fold.statistics().streams.items()}


def _notes(stream: FollowerStatistics, place: RankCheckpoint | None) -> list[str]:
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
    if place is not None and place.stale in _NOT_HEALED_BY_THE_LOG and place.epoch == stream.epoch:
        notes.append(f"was stale in the snapshot: {place.stale}")
    return notes
