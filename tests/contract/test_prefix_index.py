"""What every prefix index does. Another implementation joins by one more entry in `IMPLEMENTATIONS`."""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Protocol

import pytest

from indexer.core.tree import Depths, PrefixIndex
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import HeldBlock
from kv_protocol.splitmix import splitmix64

GPU, HOST, DISK, EXTERNAL = TIERS
U64_MAX = 2**64 - 1
TTL_S = 5.0


class MakeIndex(Protocol):
    def __call__(self, *, parked_blocks_max: int = ..., parked_ttl_s: float = ...) -> PrefixIndex: ...


IMPLEMENTATIONS: dict[str, MakeIndex] = {"python": PrefixIndex}


@pytest.fixture(params=list(IMPLEMENTATIONS.values()), ids=list(IMPLEMENTATIONS))
def make_index(request: pytest.FixtureRequest) -> MakeIndex:
    made: MakeIndex = request.param
    return made


@pytest.fixture
def index(make_index: MakeIndex) -> PrefixIndex:
    """Return an empty index that knows the ranks 0, 1 and 2."""
    return with_ranks(make_index(parked_ttl_s=TTL_S))


def with_ranks(index: PrefixIndex, ranks: int = 3) -> PrefixIndex:
    for rank in range(ranks):
        index.register(rank)
    return index


def chain(length: int, seed: int = 1) -> list[int]:
    """Return a prefix of `length` blocks, whose hashes fall into all buckets of a digest."""
    return [splitmix64(seed * 1_000_000 + at) for at in range(length)]


def both(blocks: int) -> Depths:
    return (blocks,) * 4


def held(index: PrefixIndex, rank: int) -> dict[int, tuple[int | None, int]]:
    return {block.sequence_hash: (block.parent, block.tier_bits) for block in index.dump(rank)}


def is_proven(index: PrefixIndex, rank: int) -> bool:
    """Whether the digests are those of what the dump says."""
    blocks = list(index.dump(rank))
    return all(
        index.digest(rank, tier)
        == SetDigest(block.sequence_hash for block in blocks if tier in block.tiers).of_tier(tier)
        for tier in TIERS
    )


def is_parents_first(blocks: Sequence[HeldBlock]) -> bool:
    place = {block.sequence_hash: at for at, block in enumerate(blocks)}
    return all(place.get(block.parent, -1) < at for at, block in enumerate(blocks) if block.parent is not None)


# ------------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize("query", [(), (1,), chain(9)], ids=len)
def test_an_empty_index_matches_nobody(index: PrefixIndex, query: Sequence[int]) -> None:
    assert index.match(query) == {}


def test_an_empty_query_matches_nobody(index: PrefixIndex) -> None:
    index.store(0, None, chain(3), GPU, 0)
    assert index.match([]) == {}
    assert index.match(()) == {}


@pytest.mark.parametrize("asked", range(1, 7))
@pytest.mark.parametrize("stored", range(1, 7))
def test_the_depth_is_the_longest_leading_part_that_is_held(index: PrefixIndex, stored: int, asked: int) -> None:
    path = chain(6)
    index.store(1, None, path[:stored], GPU, 0)
    assert index.match(path[:asked]) == {1: both(min(stored, asked))}


def test_a_query_that_leaves_the_path_matches_up_to_the_fork(index: PrefixIndex) -> None:
    path, other = chain(6), chain(6, seed=2)
    index.store(0, None, path, GPU, 0)
    index.store(1, path[1], other[:3], GPU, 0)  # not parked: the parent is known, though rank 1 lacks it
    assert index.match(path[:3] + other) == {0: both(3)}
    assert index.match(path[:2] + other) == {0: both(2)}
    index.store(1, None, path[:2], GPU, 0)
    assert index.match(path[:2] + other) == {0: both(2), 1: both(5)}


def test_each_rank_has_its_own_depth_and_a_rank_without_the_first_block_none(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, None, path, GPU, 0)
    index.store(1, None, path[:2], GPU, 0)
    index.store(2, path[0], path[1:], GPU, 0)
    assert index.match(path) == {0: both(4), 1: both(2)}
    assert len(held(index, 2)) == 3


@pytest.mark.parametrize("ranks", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_any_number_of_ranks_shares_a_prefix(make_index: MakeIndex, ranks: int) -> None:
    index, path = with_ranks(make_index(), ranks), chain(13)
    for rank in range(ranks):
        index.store(rank, None, path[: 1 + rank % 13], GPU, 0)
    assert index.match(path) == {rank: both(1 + rank % 13) for rank in range(ranks)}
    for rank in range(0, ranks, 2):
        index.drop(rank)
    assert index.match(path) == {rank: both(1 + rank % 13) for rank in range(1, ranks, 2)}
    assert index.statistics().ranks == ranks // 2


@pytest.mark.parametrize("rank", [0, 1, 63, 64, 255, 256, 4095])
def test_the_number_of_a_rank_is_the_callers(make_index: MakeIndex, rank: int) -> None:
    index, path = make_index(), chain(2)
    index.register(rank)
    index.store(rank, None, path, HOST, 0)
    assert index.match(path) == {rank: (0, 2, 2, 2)}
    index.clear(rank)
    assert index.match(path) == {}


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
    assert index.match(path)[0] == depths


def test_every_placing_of_three_blocks_matches_as_the_definition_says(index: PrefixIndex) -> None:
    path = chain(3)
    for placing in product(range(16), repeat=3):
        rows = [HeldBlock(path[at], path[at - 1] if at else None, bits) for at, bits in enumerate(placing) if bits]
        index.load(0, rows)
        depths = [
            next((at for at, bits in enumerate(placing) if not bits & (2 << tier) - 1), len(placing)) for tier in TIERS
        ]
        expected = {0: tuple(depths)} if depths[EXTERNAL] else {}
        assert index.match(path) == expected, placing
    assert index.statistics().nodes == 3


def test_a_tier_move_is_a_store_on_the_new_and_a_removal_from_the_old(index: PrefixIndex) -> None:
    path = chain(3)
    index.store(0, None, path, GPU, 0)
    index.store(0, path[1], path[2:], HOST, 0)
    assert index.match(path) == {0: (3, 3, 3, 3)}
    assert held(index, 0)[path[2]] == (path[1], 0b11)
    assert index.statistics().held_blocks == 3, "a block on two tiers is one block"
    index.remove(0, path[2:], GPU)
    assert index.match(path) == {0: (2, 3, 3, 3)}
    assert held(index, 0)[path[2]] == (path[1], 0b10)
    assert [index.digest(0, tier).block_count for tier in TIERS] == [2, 1, 0, 0]
    assert is_proven(index, 0)
    index.store(0, path[1], path[2:], GPU, 0)
    index.remove(0, path[2:], HOST)
    assert index.match(path) == {0: (3, 3, 3, 3)}
    assert (index.statistics().duplicate_blocks_total, index.statistics().unknown_removals_total) == (0, 0)


def test_a_move_that_is_told_the_other_way_round_ends_the_same(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, None, path, GPU, 0)
    index.remove(0, path[1:3], GPU)
    assert index.match(path) == {0: both(1)}
    index.store(0, path[0], path[1:3], DISK, 0)
    assert index.match(path) == {0: (1, 1, 4, 4)}


# ------------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize("hole", range(5))
def test_a_refilled_hole_gives_the_whole_depth_back(index: PrefixIndex, hole: int) -> None:
    path = chain(5)
    index.store(0, None, path, GPU, 0)
    index.remove(0, [path[hole]], GPU)
    assert index.match(path) == ({0: both(hole)} if hole else {})
    assert len(held(index, 0)) == 4, "what lies beyond the hole is held, though out of reach"
    assert is_proven(index, 0)
    index.store(0, path[hole - 1] if hole else None, [path[hole]], GPU, 0)
    assert index.match(path) == {0: both(5)}
    assert index.statistics().duplicate_blocks_total == 0


@pytest.mark.parametrize("refills", list(permutations(range(1, 4))), ids=str)
def test_several_holes_are_refilled_in_any_order(index: PrefixIndex, refills: tuple[int, ...]) -> None:
    path = chain(5)
    index.store(0, None, path, GPU, 0)
    index.remove(0, path[1:4], GPU)
    missing = {1, 2, 3}
    for at in refills:
        index.store(0, path[at - 1], [path[at]], GPU, 0)
        missing.remove(at)
        assert index.match(path) == {0: both(min(missing, default=5))}
    assert index.statistics().nodes == 5


def test_a_hole_refilled_on_another_tier_is_a_hole_on_its_own(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, None, path, GPU, 0)
    index.remove(0, [path[1]], GPU)
    index.store(0, path[0], [path[1]], DISK, 0)
    assert index.match(path) == {0: (1, 1, 4, 4)}


def test_one_ranks_hole_is_nobody_elses(index: PrefixIndex) -> None:
    path = chain(4)
    for rank in (0, 1):
        index.store(rank, None, path, GPU, 0)
    index.remove(0, [path[1]], GPU)
    assert index.match(path) == {0: both(1), 1: both(4)}
    index.drop(1)
    assert index.match(path) == {0: both(1)}
    assert index.statistics().nodes == 4, "the hole is nobody's and stays, for there are blocks beyond it"


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
    assert index.match(path) == {0: both(4)}
    assert is_proven(index, 0)
    index.remove(0, path, GPU)
    assert index.statistics().nodes == 0, "one removal ends what was stored twice"


def test_another_rank_or_another_tier_is_no_duplicate(index: PrefixIndex) -> None:
    path = chain(2)
    for rank, tier in product((0, 1), TIERS):
        index.store(rank, None, path, tier, 0)
    assert index.statistics().duplicate_blocks_total == 0
    assert index.statistics().held_blocks == 4


def test_a_removal_of_what_is_not_held_changes_nothing_and_is_counted(index: PrefixIndex) -> None:
    path = chain(3)
    index.store(0, None, path, GPU, 0)
    index.remove(1, path, GPU)  # another rank's
    index.remove(0, path[:2], HOST)  # another tier's
    index.remove(0, [12345], GPU)  # nobody's
    assert index.statistics().unknown_removals_total == 6
    index.remove(0, [path[2], path[2]], GPU)  # the second time
    assert index.statistics().unknown_removals_total == 7
    assert (index.match(path), held(index, 1)) == ({0: both(2)}, {})
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
    assert index.match(numbers) == {0: both(3)}
    assert is_proven(index, 0)
    index.remove(0, numbers, GPU)
    assert index.statistics().nodes == 0


def test_what_was_given_is_not_kept(index: PrefixIndex) -> None:
    path = chain(3)
    given = list(path)
    index.store(0, None, given, GPU, 0)
    given.clear()
    assert index.match(path) == {0: both(3)}
    index.remove(0, iter(path[1:]), GPU)
    assert index.match(path) == {0: both(1)}


# ------------------------------------------------------------------------------------------------- parked


def test_a_block_of_an_unknown_parent_is_parked_and_counts_for_nothing(index: PrefixIndex) -> None:
    path = chain(4)
    index.store(0, path[0], path[1:], GPU, 0)
    assert (held(index, 0), index.match(path), index.match(path[1:])) == ({}, {}, {})
    assert index.digest(0, GPU).block_count == index.digest(0, GPU).digest == 0
    now = index.statistics()
    assert (now.nodes, now.held_blocks, now.parked_blocks, now.parked_blocks_total) == (0, 0, 3, 3)


@pytest.mark.parametrize("finder", [0, 1])
def test_a_parked_chain_is_held_once_its_parent_comes_whoever_brings_it(index: PrefixIndex, finder: int) -> None:
    path = chain(4)
    index.store(0, path[0], path[1:3], HOST, 0)
    index.store(0, path[2], path[3:], GPU, 1)
    index.store(finder, None, path[:1], GPU, 2)
    assert held(index, 0).items() >= {path[1]: (path[0], 2), path[2]: (path[1], 2), path[3]: (path[2], 1)}.items()
    assert index.statistics().parked_blocks == 0
    assert index.match(path) == ({0: (1, 4, 4, 4)} if finder == 0 else {1: both(1)})
    assert is_proven(index, 0)
    assert index.expire(1e9) == set()


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_the_order_in_which_a_chain_is_told_does_not_matter(index: PrefixIndex, order: tuple[int, ...]) -> None:
    path = chain(8)
    for at in order:
        index.store(0, path[2 * at - 1] if at else None, path[2 * at : 2 * at + 2], GPU, 0)
    assert index.match(path) == {0: both(8)}
    assert held(index, 0) == {block: (path[at - 1] if at else None, 1) for at, block in enumerate(path)}
    now = index.statistics()
    assert (now.parked_blocks, now.duplicate_blocks_total, now.nodes) == (0, 0, 8)
    assert is_proven(index, 0)


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_nor_does_it_among_ranks_and_tiers(index: PrefixIndex, order: tuple[int, ...]) -> None:
    path, other = chain(3), chain(1, seed=2)
    events = [
        (0, None, path[:1], GPU),
        (1, path[0], path[1:], DISK),
        (2, path[1], other, HOST),
        (2, path[0], path[1:2], GPU),
    ]
    for at in order:
        rank, parent, blocks, tier = events[at]
        index.store(rank, parent, blocks, tier, 0)
    assert held(index, 0) == {path[0]: (None, 1)}
    assert held(index, 1) == {path[1]: (path[0], 4), path[2]: (path[1], 4)}
    assert held(index, 2) == {path[1]: (path[0], 1), other[0]: (path[1], 2)}
    assert index.statistics().parked_blocks == 0


def test_a_parked_block_told_again_is_parked_once(index: PrefixIndex) -> None:
    path = chain(3)
    for _ in range(3):
        index.store(0, path[0], path[1:], GPU, 0)
    assert index.statistics().parked_blocks == 2
    index.store(0, None, path[:1], GPU, 0)
    assert index.statistics().duplicate_blocks_total == 0
    assert index.match(path) == {0: both(3)}
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
    assert index.match(path) == {0: both(2)}
    assert index.statistics().parked_blocks == 1, "the last waits for the one that was removed"
    index.store(0, path[1], [path[2]], GPU, 0)
    assert index.match(path) == {0: both(4)}


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
            index.load(0, [])
    assert index.statistics().parked_blocks == 1
    index.store(2, None, path[:1], GPU, 0)
    assert (held(index, 0), held(index, 1)) == ({}, {path[1]: (path[0], 1)})


def test_the_parent_of_a_parked_block_may_come_as_the_unheld_parent_of_a_dump(index: PrefixIndex) -> None:
    path, other = chain(3), chain(1, seed=2)
    index.store(0, path[1], path[2:], GPU, 0)
    index.load(1, [HeldBlock(other[0], path[1], 1)])
    assert held(index, 0) == {path[2]: (path[1], 1)}, "as it is when the dump comes before the store"
    assert index.statistics().parked_blocks == 0


def test_a_block_whose_own_parent_is_known_is_not_parked_with_the_head_of_its_event(index: PrefixIndex) -> None:
    path = chain(4)
    index.load(1, [HeldBlock(path[3], path[2], 1)])  # so path[2] is known, but not where it belongs
    index.store(0, path[0], path[1:], GPU, 0)
    assert held(index, 0) == {path[3]: (path[2], 1)}
    assert index.statistics().parked_blocks == 2
    index.store(0, None, path[:1], GPU, 0)
    assert index.match(path) == {0: both(4)}


def test_parked_blocks_are_lost_after_their_time_and_their_ranks_are_named_once(index: PrefixIndex) -> None:
    path, other = chain(2), chain(2, seed=2)
    index.store(0, path[0], path[1:], GPU, 10.0)
    index.store(1, other[0], other[1:], GPU, 12.0)
    assert index.expire(10.0 + TTL_S - 0.01) == set()
    assert index.expire(10.0 + TTL_S) == {0}
    assert index.expire(10.0 + TTL_S) == set()
    assert (index.statistics().parked_blocks, index.statistics().parked_lost_blocks_total) == (1, 1)
    index.store(0, None, path[:1], GPU, 16.0)
    assert index.match(path) == {0: both(1)}
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


def test_with_no_room_at_all_nothing_is_parked(make_index: MakeIndex) -> None:
    index, path = with_ranks(make_index(parked_blocks_max=0)), chain(3)
    index.store(1, path[0], path[1:], GPU, 0)
    assert index.statistics().parked_blocks == 0
    assert index.expire(0) == {1}


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
            index.load(0, [HeldBlock(path[1], path[0], 2)])
    assert index.expire(1e9) == {1}


def test_a_rank_is_named_for_a_loss_on_a_tier_that_was_not_cleared(make_index: MakeIndex) -> None:
    index, path = with_ranks(make_index(parked_blocks_max=0)), chain(2)
    index.store(0, path[0], path[1:], HOST, 0)
    index.clear(0, GPU)
    assert index.expire(0) == {0}


# ------------------------------------------------------------------------------------------------- clear, drop


def test_a_cleared_tier_is_empty_and_the_others_are_not(index: PrefixIndex) -> None:
    path = chain(3)
    for rank, tier in product((0, 1), (GPU, DISK)):
        index.store(rank, None, path, tier, 0)
    index.clear(0, GPU)
    assert index.match(path) == {0: (0, 0, 3, 3), 1: both(3)}
    assert [index.digest(0, tier).block_count for tier in TIERS] == [0, 0, 3, 0]
    assert is_proven(index, 0)
    index.clear(0, EXTERNAL)
    assert len(held(index, 0)) == 3
    index.clear(0)
    assert (index.match(path), held(index, 0)) == ({1: both(3)}, {})
    assert is_proven(index, 0)
    assert index.statistics().unknown_removals_total == 0


def test_a_dropped_rank_is_unknown_and_comes_back_empty(index: PrefixIndex) -> None:
    path = chain(3)
    for rank in (0, 1):
        index.store(rank, None, path, GPU, 0)
    index.drop(0)
    assert (index.match(path), index.statistics().ranks) == ({1: both(3)}, 2)
    index.drop(0)
    index.drop(77)
    assert index.statistics().ranks == 2
    index.register(0)
    assert (held(index, 0), index.digest(0, GPU).block_count) == ({}, 0)
    assert index.match(path) == {1: both(3)}


def test_registering_a_known_rank_keeps_what_it_holds(index: PrefixIndex) -> None:
    index.store(0, None, chain(2), GPU, 0)
    index.register(0)
    assert index.match(chain(2)) == {0: both(2)}


# ------------------------------------------------------------------------------------------------- dump, load


def forest(index: PrefixIndex) -> list[list[int]]:
    """Rank 0 holds two trees with forks, on several tiers, with a hole; return its paths."""
    trunk, left, right, other = chain(4), chain(3, seed=2), chain(2, seed=3), chain(3, seed=4)
    index.store(0, None, trunk, GPU, 0)
    index.store(0, trunk[1], left, HOST, 0)
    index.store(0, left[0], right, GPU, 0)
    index.store(0, None, other, DISK, 0)
    index.store(0, None, trunk[:2], HOST, 0)
    index.remove(0, [other[1]], DISK)
    index.remove(0, [trunk[0]], GPU)
    return [trunk, trunk[:2] + left, trunk[:2] + left[:1] + right, other]


def test_a_dump_names_each_held_block_once_and_parents_first(index: PrefixIndex) -> None:
    forest(index)
    blocks = list(index.dump(0))
    assert len(blocks) == len(held(index, 0)) == index.statistics().held_blocks == 11
    assert is_parents_first(blocks)
    assert list(index.dump(1)) == []


def test_a_loaded_dump_is_the_same_set(index: PrefixIndex, make_index: MakeIndex) -> None:
    paths, copy = forest(index), with_ranks(make_index())
    copy.store(2, None, chain(2, seed=9), GPU, 0)
    copy.load(1, index.dump(0))
    assert held(copy, 1) == held(index, 0)
    assert [copy.digest(1, tier) for tier in TIERS] == [index.digest(0, tier) for tier in TIERS]
    assert [copy.match(path).get(1) for path in paths] == [index.match(path).get(0) for path in paths]
    assert is_parents_first(list(copy.dump(1)))
    copy.drop(1)
    assert copy.statistics().nodes == 2


def test_a_load_replaces_all_that_was_held_or_parked(index: PrefixIndex) -> None:
    path, other = chain(3), chain(3, seed=2)
    index.store(0, None, path, GPU, 0)
    index.store(0, other[0], other[1:], GPU, 0)
    index.load(0, [HeldBlock(path[0], None, 0b10), HeldBlock(other[0], None, 1)])
    assert held(index, 0) == {path[0]: (None, 2), other[0]: (None, 1)}
    assert index.match(path) == {0: (0, 1, 1, 1)}
    assert is_proven(index, 0)
    index.load(0, [])
    assert (held(index, 0), index.statistics().nodes) == ({}, 0)


def test_a_dump_is_believed_about_blocks_whose_parent_is_not_held(index: PrefixIndex) -> None:
    path = chain(4)
    rows = [HeldBlock(path[1], path[0], 1), HeldBlock(path[3], path[2], 1)]
    index.load(0, rows)
    assert held(index, 0) == {path[1]: (path[0], 1), path[3]: (path[2], 1)}
    assert index.statistics().parked_blocks == 0
    assert (index.match(path), index.digest(0, GPU).block_count) == ({}, 2)
    index.store(0, path[1], [path[2]], GPU, 0)  # the unheld parents are known: nothing is parked
    index.store(0, None, [path[0]], GPU, 0)
    assert index.match(path) == {0: both(4)}
    assert index.statistics().parent_conflicts_total == 0
    assert held(index, 0) == {block: (path[at - 1] if at else None, 1) for at, block in enumerate(path)}


def test_an_unheld_parent_is_forgotten_with_its_last_child(index: PrefixIndex) -> None:
    path = chain(4)
    index.load(0, [HeldBlock(path[1], path[0], 1)])
    index.load(1, [HeldBlock(path[3], path[2], 1)])
    index.store(2, path[0], chain(2, seed=2), GPU, 0)  # beside path[1], under the unheld path[0]
    assert index.statistics().nodes == 6
    index.clear(0)
    index.clear(1)
    assert index.statistics().nodes == 3
    index.clear(2)
    assert index.statistics().nodes == 0
    index.store(0, path[0], path[1:2], GPU, 0)
    assert index.statistics().parked_blocks == 1, "nobody ever had the parent again"


# ------------------------------------------------------------------------------------------------- memory, proof


@pytest.mark.parametrize("order", list(permutations(range(5))), ids=str)
def test_nothing_is_left_when_all_is_removed_in_whatever_order(index: PrefixIndex, order: tuple[int, ...]) -> None:
    path, twig = chain(4), chain(1, seed=2)
    index.store(0, None, path, GPU, 0)
    index.store(0, path[1], twig, GPU, 0)
    for at in order:
        index.remove(0, [(path + twig)[at]], GPU)
        assert is_proven(index, 0)
    now = index.statistics()
    assert (now.nodes, now.held_blocks, now.unknown_removals_total) == (0, 0, 0)


def test_the_digest_is_that_of_the_set_at_any_time(index: PrefixIndex) -> None:
    path = chain(6)
    for step in range(400):
        rank, tier, at = (splitmix64(step * 3 + part) % size for part, size in enumerate((3, 4, 6)))
        match splitmix64(step) >> 33 & 3:
            case 0 | 1:
                index.store(rank, path[at - 1] if at else None, path[at : at + 1 + step % 3], TIERS[tier], step)
            case 2:
                index.remove(rank, path[at : at + 1 + step % 3], TIERS[tier])
            case _ if step % 5 == 0:
                index.clear(rank, TIERS[tier])
        assert all(is_proven(index, each) for each in range(3)), step
    assert index.statistics().held_blocks > 0


def test_a_chain_of_any_length_needs_no_deep_stack(index: PrefixIndex) -> None:
    path = chain(20_000)
    for at in range(5_000, 10_000):  # last ones first: each is parked until the root comes
        index.store(0, path[at - 1], path[at : at + 1], GPU, 0)
    index.store(0, path[9_999], path[10_000:], GPU, 0)
    index.store(0, None, path[:5_000], GPU, 0)
    assert index.match(path) == {0: both(20_000)}
    index.load(1, index.dump(0))
    index.drop(0)
    assert index.match(path) == {1: both(20_000)}
    index.remove(1, path, GPU)
    assert (index.statistics().nodes, index.statistics().parked_blocks) == (0, 0)
