"""What every prefix index does with what ranks hold."""

from collections.abc import Sequence
from itertools import product

import pytest

from indexer.index.prefix_index import Depths, PrefixIndex
from kv_protocol.events import TIERS, Tier
from tests.contract.indexes import (
    DISK,
    EXTERNAL,
    GPU,
    HOST,
    U64_MAX,
    MakeIndex,
    both,
    chain,
    held,
    is_proven,
    with_ranks,
)

# ------------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize("query", [(), (1,), chain(9)], ids=len)
def test_an_empty_index_matches_no_rank(index: PrefixIndex, query: Sequence[int]) -> None:
    assert index.overlaps(query) == {}


def test_an_empty_query_matches_no_rank(index: PrefixIndex) -> None:
    index.store(0, None, chain(3), GPU, 0)
    assert index.overlaps([]) == {}
    assert index.overlaps(()) == {}


@pytest.mark.parametrize("asked", range(1, 7))
@pytest.mark.parametrize("stored", range(1, 7))
def test_the_depth_is_the_longest_leading_part_that_is_held(index: PrefixIndex, stored: int, asked: int) -> None:
    path = chain(6)
    index.store(1, None, path[:stored], GPU, 0)
    assert index.overlaps(path[:asked]) == {1: both(min(stored, asked))}


def test_a_query_that_leaves_the_path_matches_up_to_the_fork(index: PrefixIndex) -> None:
    path, other = chain(6), chain(6, seed=2)
    index.store(0, None, path, GPU, 0)
    index.store(1, path[1], other[:3], GPU, 0)  # not parked: the parent is known, though rank 1 lacks it
    assert index.overlaps(path[:3] + other) == {0: both(3)}
    assert index.overlaps(path[:2] + other) == {0: both(2)}
    index.store(1, None, path[:2], GPU, 0)
    assert index.overlaps(path[:2] + other) == {0: both(2), 1: both(5)}


def test_each_rank_has_its_own_depth_and_a_rank_without_the_first_block_none(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, None, path, GPU, 0)
    index.store(1, None, path[:2], GPU, 0)
    index.store(2, path[0], path[1:], GPU, 0)
    assert index.overlaps(path) == {0: both(4), 1: both(2)}
    assert len(held(index, 2)) == 3


@pytest.mark.parametrize("ranks", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_any_number_of_ranks_shares_a_prefix(make_index: MakeIndex, ranks: int) -> None:
    index, path = with_ranks(make_index(), ranks), chain(13)
    for rank in range(ranks):
        index.store(rank, None, path[: 1 + rank % 13], GPU, 0)
    assert index.overlaps(path) == {rank: both(1 + rank % 13) for rank in range(ranks)}
    for rank in range(0, ranks, 2):
        index.drop(rank)
    assert index.overlaps(path) == {rank: both(1 + rank % 13) for rank in range(1, ranks, 2)}
    assert index.statistics().ranks == ranks // 2


# ------------------------------------------------------------------------------------------------- tiers


@pytest.mark.parametrize(
    ("tiers", "depths"),
    [
        ([{GPU}, {GPU}, {GPU}], (3, 3, 3, 3)),
        ([{GPU}, {HOST}, {DISK}, {EXTERNAL}], (1, 2, 3, 4)),
        ([{HOST}, {GPU}, {GPU}], (0, 3, 3, 3)),
        ([{EXTERNAL}], (0, 0, 0, 1)),
        ([{GPU, EXTERNAL}, {EXTERNAL}, {GPU}], (1, 1, 1, 3)),
        ([{DISK}, {HOST}, set(), {GPU}], (0, 0, 2, 2)),
        ([{GPU, HOST, DISK, EXTERNAL}, {DISK}], (1, 1, 2, 2)),
    ],
)
def test_depth_t_counts_blocks_that_lie_on_one_of_the_tiers_up_to_t(
    index: PrefixIndex, tiers: list[set[Tier]], depths: Depths
) -> None:
    path = chain(len(tiers))
    index.store(1, None, path, GPU, 0)  # so that every parent is known
    for at, on in enumerate(tiers):
        for tier in on:
            index.store(0, path[at - 1] if at else None, path[at : at + 1], tier, 0)
    assert index.overlaps(path)[0] == depths


def test_a_tier_move_is_a_store_on_the_new_and_a_removal_from_the_old(index: PrefixIndex) -> None:
    path = chain(3)
    index.store(0, None, path, GPU, 0)
    index.store(0, path[1], path[2:], HOST, 0)
    assert index.overlaps(path) == {0: (3, 3, 3, 3)}
    assert held(index, 0)[path[2]] == (path[1], 0b11)
    assert index.statistics().held_blocks == 3, "a block on two tiers is one block"
    index.remove(0, path[2:], GPU)
    assert index.overlaps(path) == {0: (2, 3, 3, 3)}
    assert held(index, 0)[path[2]] == (path[1], 0b10)
    assert [index.digest(0, tier).block_count for tier in TIERS] == [2, 1, 0, 0]
    assert is_proven(index, 0)
    index.store(0, path[1], path[2:], GPU, 0)
    index.remove(0, path[2:], HOST)
    assert index.overlaps(path) == {0: (3, 3, 3, 3)}
    assert (index.statistics().duplicate_blocks_total, index.statistics().unknown_removals_total) == (0, 0)


# ------------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize("hole", range(5))
def test_a_refilled_hole_gives_the_whole_depth_back(index: PrefixIndex, hole: int) -> None:
    path = chain(5)
    index.store(0, None, path, GPU, 0)
    index.remove(0, [path[hole]], GPU)
    assert index.overlaps(path) == ({0: both(hole)} if hole else {})
    assert len(held(index, 0)) == 4, "what lies beyond the hole is held, though out of reach"
    assert is_proven(index, 0)
    index.store(0, path[hole - 1] if hole else None, [path[hole]], GPU, 0)
    assert index.overlaps(path) == {0: both(5)}
    assert index.statistics().duplicate_blocks_total == 0


def test_a_hole_refilled_on_another_tier_is_a_hole_on_its_own(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, None, path, GPU, 0)
    index.remove(0, [path[1]], GPU)
    index.store(0, path[0], [path[1]], DISK, 0)
    assert index.overlaps(path) == {0: (1, 1, 4, 4)}


# ------------------------------------------------------------------------------------------------- counted no-ops


def test_a_duplicate_changes_nothing_and_is_counted(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, None, path[:3], GPU, 0)
    before = held(index, 0)
    index.store(0, None, path[:3], GPU, 0)
    index.store(0, path[0], path[1:3], GPU, 0)
    assert held(index, 0) == before
    assert index.statistics().duplicate_blocks_total == 5
    index.store(0, path[1], path[2:], GPU, 0)  # one old, one new
    assert index.statistics().duplicate_blocks_total == 6
    assert index.overlaps(path) == {0: both(4)}
    assert is_proven(index, 0)
    index.remove(0, path, GPU)
    assert index.statistics().nodes == 0, "one removal ends what was stored twice"


def test_a_removal_of_what_is_not_held_changes_nothing_and_is_counted(index: PrefixIndex) -> None:
    path = chain(3)
    index.store(0, None, path, GPU, 0)
    index.remove(1, path, GPU)  # another rank's
    index.remove(0, path[:2], HOST)  # another tier's
    index.remove(0, [12345], GPU)  # held by no rank
    assert index.statistics().unknown_removals_total == 6
    index.remove(0, [path[2], path[2]], GPU)  # the second time
    assert index.statistics().unknown_removals_total == 7
    assert (index.overlaps(path), held(index, 1)) == ({0: both(2)}, {})
    assert is_proven(index, 0)
    assert is_proven(index, 1)


def test_a_second_parent_of_a_block_is_counted_and_not_believed(index: PrefixIndex) -> None:
    path = chain(3)
    index.store(0, None, path, GPU, 0)
    index.store(1, path[0], [path[2]], GPU, 0)
    assert index.statistics().parent_conflicts_total == 1
    assert held(index, 1) == {path[2]: (path[1], 1)}
    index.clear(0)
    index.clear(1)
    assert index.statistics().nodes == 0


@pytest.mark.parametrize("numbers", [(0, 1, U64_MAX), (U64_MAX, 0, 1), (1, U64_MAX, 0)])
def test_zero_and_the_largest_number_are_hashes_like_others(index: PrefixIndex, numbers: tuple[int, ...]) -> None:
    index.store(0, numbers[0], numbers[1:], GPU, 0)
    assert held(index, 0) == {}
    index.store(0, None, numbers[:1], GPU, 0)
    assert index.overlaps(numbers) == {0: both(3)}
    assert is_proven(index, 0)
    index.remove(0, numbers, GPU)
    assert index.statistics().nodes == 0


# ------------------------------------------------------------------------------------------------- clear, drop


def test_a_cleared_tier_is_empty_and_the_others_are_not(index: PrefixIndex) -> None:
    path = chain(3)
    for rank, tier in product((0, 1), (GPU, DISK)):
        index.store(rank, None, path, tier, 0)
    index.clear(0, GPU)
    assert index.overlaps(path) == {0: (0, 0, 3, 3), 1: both(3)}
    assert [index.digest(0, tier).block_count for tier in TIERS] == [0, 0, 3, 0]
    assert is_proven(index, 0)
    index.clear(0, EXTERNAL)
    assert len(held(index, 0)) == 3
    index.clear(0)
    assert (index.overlaps(path), held(index, 0)) == ({1: both(3)}, {})
    assert is_proven(index, 0)
    assert index.statistics().unknown_removals_total == 0


def test_a_dropped_rank_is_unknown_and_comes_back_empty(index: PrefixIndex) -> None:
    path = chain(3)
    for rank in (0, 1):
        index.store(rank, None, path, GPU, 0)
    index.drop(0)
    assert (index.overlaps(path), index.statistics().ranks) == ({1: both(3)}, 2)
    index.drop(0)
    index.drop(77)
    assert index.statistics().ranks == 2
    index.register(0)
    assert (held(index, 0), index.digest(0, GPU).block_count) == ({}, 0)
    assert index.overlaps(path) == {1: both(3)}
