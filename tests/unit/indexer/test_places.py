"""Ranks get places; what their workers said of their capacity goes to the index with them, whichever comes first."""

from collections.abc import Iterator

from indexer.follow.fold import IndexFold
from indexer.follow.inputs import Received, WorkerCame, WorkerGone
from indexer.index.prefix_index import RANKS_MAX
from indexer.index.slots import RankSlots
from indexer.native.index import NativeIndex
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from tests.reference.index.index import ReferenceIndex

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
PULSE = Heartbeat(instance="i", epoch=7, last_seq=0)


class Recording(ReferenceIndex):
    """Knows what it was told of capacities."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int]] = []

    def register(self, rank: int, capacity_blocks: int = 0) -> None:
        super().register(rank, capacity_blocks)
        self.told.append((rank, capacity_blocks))

    def news(self) -> list[tuple[int, int]]:
        told, self.told = self.told, []
        return told


def recorded() -> tuple[RankSlots, Recording]:
    return RankSlots(index := Recording()), index


def test_a_capacity_that_was_said_before_goes_with_each_rank_of_its_worker() -> None:
    places, index = recorded()
    places.set_capacity("a", 5000)
    assert [places.take(rank, 0.0) for rank in (A0, B0, A1)] == [0, 1, 2]
    assert index.news() == [(0, 5000), (1, 0), (2, 5000)]


def test_a_capacity_that_is_said_afterwards_is_told_of_each_rank_of_its_worker() -> None:
    places, index = recorded()
    for rank in (A0, B0, A1):
        places.take(rank, 0.0)
    index.news()
    places.set_capacity("a", 5000)
    places.set_capacity("unknown", 1)
    assert index.news() == [(0, 5000), (2, 5000)]


def test_a_capacity_without_measure_is_the_largest_that_an_index_is_told() -> None:
    places, index = recorded()
    places.set_capacity("a", 2**64 - 1)
    places.take(A0, 0.0)
    assert index.news() == [(0, 2**32 - 1)]


def test_of_workers_without_end_the_newest_are_remembered() -> None:
    places, index = recorded()
    for number in range(RANKS_MAX):
        places.set_capacity(f"w{number}", 1 + number)
    for worker_id, capacity_blocks in (("w1", 7), ("a", 5000), ("b", 40)):
        places.set_capacity(worker_id, capacity_blocks)
    for rank in (A0, B0, *(WorkerRank(f"w{number}", 0) for number in range(4))):
        places.take(rank, 0.0)
    assert index.news() == [(0, 5000), (1, 40), (2, 0), (3, 7), (4, 0), (5, 4)], "w1 spoke last, w0 and w2 first"


def test_what_a_worker_says_when_it_comes_is_its_ranks_capacity() -> None:
    fold = IndexFold(index := Recording())
    facts = WorkerCame("a", 5000), Received(A0, PULSE), Received(B0, None), WorkerCame("b", 40), WorkerGone("a")
    for fact in facts:
        fold.apply(fact, 0.0)
    assert index.news() == [(0, 5000), (1, 0), (1, 40)]


def test_a_former_instance_that_leaves_late_takes_no_capacity_of_the_living_one() -> None:
    fold = IndexFold(index := Recording())
    came, pulse = WorkerCame("a", 500, PULSE.instance), Received(A0, PULSE)
    for fact in (came, WorkerGone("a", "former"), pulse, WorkerGone("a", PULSE.instance), pulse):
        fold.apply(fact, 0.0)
    assert index.news() == [(0, 500), (0, 0)]


def test_the_native_index_makes_room_for_it() -> None:
    def sizes() -> Iterator[int]:
        fold = IndexFold(index := NativeIndex())
        for fact in (Received(A0, PULSE), WorkerCame("a", 1_000_000)):
            fold.apply(fact, 0.0)
            yield index.statistics().memory_bytes

    before, after = sizes()
    assert after > 2 * before
