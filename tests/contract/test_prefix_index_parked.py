"""What every prefix index does with blocks whose parent is unknown."""

import pytest

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import GPU, HOST, TTL_S, MakeIndex, both, chain, held, load, overlaps, with_ranks

# ------------------------------------------------------------------------------------------------- parked


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
    assert overlaps(index, path) == {0: both(4)}


def test_parked_blocks_are_lost_after_their_time_and_their_ranks_are_named_once(index: PrefixIndex) -> None:
    path, other = chain(2), chain(2, seed=2)
    index.store(0, path[0], path[1:], GPU, 10.0)
    index.store(1, other[0], other[1:], GPU, 12.0)
    assert index.expire(10.0 + TTL_S - 0.01) == set()
    assert index.expire(10.0 + TTL_S) == {0}
    assert index.expire(10.0 + TTL_S) == set()
    assert (index.statistics().parked_blocks, index.statistics().parked_lost_blocks_total) == (1, 1)
    index.store(0, None, path[:1], GPU, 16.0)
    assert overlaps(index, path) == {0: both(1)}
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
