"""Batches that wait for their turn: few, and not many blocks."""

from indexer.follow.kept_batches import ReorderBuffer
from kv_protocol.events import Batch, Cleared, Stored


def blocks(count: int) -> Stored:
    return Stored(tuple(range(1, count + 1)))


def test_the_oldest_give_way_to_the_batches_that_are_too_many() -> None:
    kept = ReorderBuffer(2, 99)
    assert [kept.keep(Batch(7, seq, Cleared()), 0) for seq in (3, 2, 4, 5)] == [0, 0, 1, 1]
    assert [batch.seq for batch in kept.following(3)] == [4, 5]


def test_the_oldest_give_way_to_the_blocks_that_are_too_many() -> None:
    kept = ReorderBuffer(99, 10)
    lost = [kept.keep(Batch(7, seq, blocks(count)), 0) for seq, count in ((2, 4), (3, 4), (4, 1), (5, 6), (6, 3))]
    assert lost == [0, 0, 0, 2, 0]
    assert [batch.seq for batch in kept.following(3)] == [4, 5, 6]


def test_the_last_is_kept_however_large() -> None:
    kept = ReorderBuffer(99, 10)
    assert [kept.keep(Batch(7, seq, blocks(count)), 0) for seq, count in ((2, 4), (3, 40))] == [0, 1]
    assert [batch.seq for batch in kept.following(2)] == [3]


def test_what_comes_again_or_goes_makes_room() -> None:
    kept = ReorderBuffer(99, 10)
    assert [kept.keep(Batch(7, 2, blocks(6)), 0) for _ in range(3)] == [0, 0, 0]
    assert kept.drop_up_to(2) == 1
    assert kept.keep(Batch(7, 3, blocks(6)), 0) == 0
    assert [batch.seq for batch in kept.following(2)] == [3]
    assert kept.keep(Batch(7, 5, blocks(6)), 0) == 0
    kept.clear()
    assert kept.keep(Batch(7, 6, blocks(10)), 0) == 0
    assert len(kept) == 1
