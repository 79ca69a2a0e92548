"""What every prefix index does with blocks whose parent is unknown."""

from itertools import permutations, product

import pytest

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import (
    GPU,
    HOST,
    TTL_S,
    MakeIndex,
    both,
    chain,
    held,
    is_proven,
    load,
    with_ranks,
)

# ------------------------------------------------------------------------------------------------- parked


def test_a_block_of_an_unknown_parent_is_parked_and_counts_for_nothing(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, path[0], path[1:], GPU, 0)
    assert (held(index, 0), index.overlaps(path), index.overlaps(path[1:])) == ({}, {}, {})
    assert index.digest(0, GPU).block_count == index.digest(0, GPU).digest == 0
    now = index.statistics()
    assert (now.nodes, now.held_blocks, now.parked_blocks, now.parked_blocks_total) == (0, 0, 3, 3)


@pytest.mark.parametrize("finder", [0, 1])
def test_a_parked_chain_is_held_once_any_rank_stores_its_parent(index: PrefixIndex, finder: int) -> None:
    path = chain(4)
    index.store(0, path[0], path[1:3], HOST, 0)
    index.store(0, path[2], path[3:], GPU, 1)
    index.store(finder, None, path[:1], GPU, 2)
    assert held(index, 0).items() >= {path[1]: (path[0], 2), path[2]: (path[1], 2), path[3]: (path[2], 1)}.items()
    assert index.statistics().parked_blocks == 0
    assert index.overlaps(path) == ({0: (1, 4, 4, 4)} if finder == 0 else {1: both(1)})
    assert is_proven(index, 0)
    assert index.expire(1e9) == set()


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_the_order_in_which_a_chain_is_told_does_not_matter(index: PrefixIndex, order: tuple[int, ...]) -> None:
    path = chain(8)
    for at in order:
        index.store(0, path[2 * at - 1] if at else None, path[2 * at : 2 * at + 2], GPU, 0)
    assert index.overlaps(path) == {0: both(8)}
    assert held(index, 0) == {block: (path[at - 1] if at else None, 1) for at, block in enumerate(path)}
    now = index.statistics()
    assert (now.parked_blocks, now.duplicate_blocks_total, now.nodes) == (0, 0, 8)
    assert is_proven(index, 0)


def test_a_parked_block_told_again_is_parked_once(index: PrefixIndex) -> None:
    path = chain(3)
    for _ in range(3):
        index.store(0, path[0], path[1:], GPU, 0)
    assert index.statistics().parked_blocks == 2
    index.store(0, None, path[:1], GPU, 0)
    assert index.statistics().duplicate_blocks_total == 0
    assert index.overlaps(path) == {0: both(3)}
    assert is_proven(index, 0)


def test_a_parked_block_can_be_removed(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, path[0], path[1:], GPU, 0)
    index.remove(0, [path[2]], GPU)
    assert (index.statistics().parked_blocks, index.statistics().unknown_removals_total) == (2, 0)
    index.remove(0, [path[1]], HOST)
    index.remove(1, [path[1]], GPU)
    assert (index.statistics().parked_blocks, index.statistics().unknown_removals_total) == (2, 2)
    index.store(0, None, path[:1], GPU, 0)
    assert index.overlaps(path) == {0: both(2)}
    assert index.statistics().parked_blocks == 1, "the last waits for the one that was removed"
    index.store(0, path[1], [path[2]], GPU, 0)
    assert index.overlaps(path) == {0: both(4)}


def test_clearing_a_tier_forgets_what_was_parked_on_it_and_no_more(index: PrefixIndex) -> None:
    path = chain(2)
    for rank, tier in product((0, 1), (GPU, HOST)):
        index.store(rank, path[0], path[1:], tier, 0)
    index.clear(0, GPU)
    assert index.statistics().parked_blocks == 3
    index.store(2, None, path[:1], GPU, 0)
    assert (held(index, 0), held(index, 1)) == ({path[1]: (path[0], 2)}, {path[1]: (path[0], 3)})


@pytest.mark.parametrize("end", ["clear", "drop", "load"])
def test_nothing_parked_outlives_what_ends_the_whole_rank(index: PrefixIndex, end: str) -> None:
    path = chain(2)
    index.store(0, path[0], path[1:], GPU, 0)
    index.store(1, path[0], path[1:], GPU, 0)
    match end:
        case "clear":
            index.clear(0)
        case "drop":
            index.drop(0)
            index.register(0)
        case "load":
            load(index, 0, [])
    assert index.statistics().parked_blocks == 1
    index.store(2, None, path[:1], GPU, 0)
    assert (held(index, 0), held(index, 1)) == ({}, {path[1]: (path[0], 1)})


def test_the_parent_of_a_parked_block_may_come_as_the_unheld_parent_of_a_dump(index: PrefixIndex) -> None:
    path, other = chain(3), chain(1, seed=2)
    index.store(0, path[1], path[2:], GPU, 0)
    load(index, 1, [HeldBlock(other[0], path[1], 1)])
    assert held(index, 0) == {path[2]: (path[1], 1)}, "as it is when the dump comes before the store"
    assert index.statistics().parked_blocks == 0


def test_a_block_whose_own_parent_is_known_is_not_parked_with_the_head_of_its_event(index: PrefixIndex) -> None:
    path = chain(4)
    load(index, 1, [HeldBlock(path[3], path[2], 1)])  # so path[2] is known, but not where it belongs
    index.store(0, path[0], path[1:], GPU, 0)
    assert held(index, 0) == {path[3]: (path[2], 1)}
    assert index.statistics().parked_blocks == 2
    index.store(0, None, path[:1], GPU, 0)
    assert index.overlaps(path) == {0: both(4)}


def test_parked_blocks_are_lost_after_their_time_and_their_ranks_are_named_once(index: PrefixIndex) -> None:
    path, other = chain(2), chain(2, seed=2)
    index.store(0, path[0], path[1:], GPU, 10.0)
    index.store(1, other[0], other[1:], GPU, 12.0)
    assert index.expire(10.0 + TTL_S - 0.01) == set()
    assert index.expire(10.0 + TTL_S) == {0}
    assert index.expire(10.0 + TTL_S) == set()
    assert (index.statistics().parked_blocks, index.statistics().parked_lost_blocks_total) == (1, 1)
    index.store(0, None, path[:1], GPU, 16.0)
    assert index.overlaps(path) == {0: both(1)}
    assert index.expire(1e9) == {1}
    assert index.statistics().parked_blocks == 0


def test_beyond_the_bound_the_oldest_gives_way_and_its_rank_is_named(make_index: MakeIndex) -> None:
    index, path = with_ranks(make_index(parked_blocks_max=3, parked_ttl_s=TTL_S)), chain(5)
    index.store(0, path[0], path[1:2], GPU, 0)
    index.store(1, path[0], path[1:4], GPU, 0)
    assert (index.statistics().parked_blocks, index.statistics().parked_lost_blocks_total) == (3, 1)
    assert index.expire(0) == {0}
    index.store(2, None, path[:1], GPU, 0)
    assert (len(held(index, 0)), len(held(index, 1))) == (0, 3)
    assert index.expire(1e9) == set()


@pytest.mark.parametrize("end", ["clear", "clear of the tier", "drop", "load"])
def test_a_rank_that_began_anew_is_not_named_for_what_it_lost_before(make_index: MakeIndex, end: str) -> None:
    index, path = with_ranks(make_index(parked_blocks_max=0)), chain(2)
    index.store(0, path[0], path[1:], HOST, 0)
    index.store(1, path[0], path[1:], HOST, 0)
    match end:
        case "clear":
            index.clear(0)
        case "clear of the tier":
            index.clear(0, HOST)
        case "drop":
            index.drop(0)
            index.register(0)  # the number may be given to another rank
        case "load":
            load(index, 0, [HeldBlock(path[1], path[0], 2)])
    assert index.expire(1e9) == {1}
