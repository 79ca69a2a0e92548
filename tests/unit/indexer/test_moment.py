"""A moment of the past: what has to be said of a rank there, and of which ranks nothing has."""

import pytest

from indexer.follow.checkpoint import Checkpoint, RankCheckpoint
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import Received
from indexer.service.history import Moment
from kv_protocol.events import Batch, Stored
from kv_protocol.ids import WorkerRank
from tests.reference.index.index import ReferenceIndex
from tests.unit.indexer.life import arrived, unreadable

A0 = WorkerRank("a", 0)


def empty() -> IndexFold:
    return IndexFold(ReferenceIndex())


def batch(seq: int, epoch: int = 7) -> Received:
    return arrived(A0, Batch(epoch, seq, Stored((seq,))))


def moment(fold: IndexFold, *rank_checkpoints: RankCheckpoint) -> Moment:
    return Moment(fold, 10, 1, Checkpoint("2026", 9, 1, rank_checkpoints, b"") if rank_checkpoints else None)


def restored(seq: int, logged_seq: int, stale: str = "") -> Moment:
    """Return the moment of a snapshot in which a rank was so."""
    index = ReferenceIndex()
    index.register(0)
    checkpoint = RankCheckpoint(*A0, 0, 7, seq, logged_seq, stale, "i")
    fold = empty()
    fold.restore(Checkpoint("2026", 9, 1, (checkpoint,), index.snapshot()), 0.0)
    return moment(fold, checkpoint)


def test_of_a_rank_whose_batches_are_all_there_nothing_is_said() -> None:
    fold = empty()
    fold.apply(batch(1), 0.0)
    assert moment(fold).notes() == {A0: []}
    assert restored(5, 5).notes() == {A0: []}


def test_a_hole_in_the_log_is_said_and_unreadable_bytes_are() -> None:
    for fact in (batch(3), unreadable(A0)):
        fold = empty()
        fold.apply(batch(1), 0.0)
        fold.apply(fact, 0.0)
        assert moment(fold).notes() == {A0: ["behind seq 1 the log has a hole, or bytes that cannot be read"]}


@pytest.mark.parametrize(
    ("seq", "logged_seq", "note"),
    [
        (5, 3, "ahead of the log by 2 batches, which the snapshot has from an answer"),
        (3, 5, "the snapshot lacked 2 batches that the log had brought"),
    ],
)
def test_a_rank_that_was_not_where_the_log_had_brought_it_is_said_to_be(seq: int, logged_seq: int, note: str) -> None:
    assert restored(seq, logged_seq).notes() == {A0: [note]}


def test_once_the_log_has_come_where_a_rank_was_ahead_nothing_is_said() -> None:
    then = restored(5, 3)
    for seq in (4, 5):
        then.fold.apply(batch(seq), 0.0)
    assert then.notes() == {A0: []}


def test_a_life_of_which_only_a_heartbeat_told_is_said_until_the_log_tells_of_it() -> None:
    then = restored(0, 0)
    note = "the snapshot has this epoch from a heartbeat, and the log has no batch of it yet"
    assert then.notes() == {A0: [note]}
    then.fold.apply(batch(1), 0.0)
    assert then.notes() == {A0: []}


def test_what_was_wrong_in_the_snapshot_is_said_until_the_next_life() -> None:
    then = restored(5, 5, stale="source")
    assert then.notes() == {A0: ["was stale in the snapshot: source"]}
    assert restored(5, 5, stale="behind").notes() == {A0: []}
    then.fold.apply(batch(6), 0.0)
    assert then.notes() == {A0: ["was stale in the snapshot: source"]}
    then.fold.apply(batch(1, epoch=8), 0.0)
    assert then.notes() == {A0: []}
