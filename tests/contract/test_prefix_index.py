"""What every prefix index does with what ranks hold, in whatever form, and with blocks whose parent is unknown."""

from array import array
from collections.abc import Callable

import pytest

from indexer.index.prefix_index import RANKS_MAX, Depths, Hashes, PrefixIndex
from kv_protocol.codec import encode_message, pack_u64
from kv_protocol.events import TIERS, Batch, Stored, Tier
from tests.contract.indexes import (
    DISK,
    EXTERNAL,
    GPU,
    HOST,
    U64_MAX,
    MakeIndex,
    assert_sound,
    both,
    chain,
    held,
    overlaps,
    with_ranks,
)

# ------------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize("ranks", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_any_number_of_ranks_shares_a_prefix(make_index: MakeIndex, ranks: int) -> None:
    index, path = with_ranks(make_index(), ranks), chain(13)
    for rank in range(ranks):
        index.store(rank, None, path[: 1 + rank % 13], GPU, 0)
    assert overlaps(index, path) == {rank: both(1 + rank % 13) for rank in range(ranks)}
    for rank in range(0, ranks, 2):
        index.drop(rank)
    assert overlaps(index, path) == {rank: both(1 + rank % 13) for rank in range(1, ranks, 2)}
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
    assert overlaps(index, path)[0] == depths


# ------------------------------------------------------------------------------------------------- counted no-ops


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
    assert overlaps(index, numbers) == {}
    index.store(0, None, numbers[:1], GPU, 0)
    assert overlaps(index, numbers) == {0: both(3)}
    assert_sound(index, 0)
    index.remove(0, numbers, GPU)
    assert index.statistics().nodes == 0


PATH = [*chain(3), 0, U64_MAX]
MESSAGE = encode_message([Batch(1, 1, Stored((1,)))])


@pytest.mark.parametrize("form", [list, tuple, pack_u64])
def test_hashes_come_as_numbers_or_packed(index: PrefixIndex, form: Callable[[list[int]], Hashes]) -> None:
    index.store(0, None, form(PATH), GPU, 0)
    assert list(held(index, 0)) == PATH
    assert overlaps(index, form(PATH)) == {0: both(5)}
    index.remove(0, form(PATH[1:]), GPU)
    assert overlaps(index, form(PATH)) == {0: both(1)}


@pytest.mark.parametrize("rank", [3, RANKS_MAX - 1, RANKS_MAX])
def test_an_unknown_rank_is_a_key_error_and_dropping_it_is_nothing(index: PrefixIndex, rank: int) -> None:
    index.store(0, None, PATH, GPU, 0)
    before = index.snapshot(), index.statistics()
    for ask in (
        lambda: index.store(rank, None, PATH, GPU, 0),
        lambda: index.store(rank, 77, [1], GPU, 0),
        lambda: index.remove(rank, PATH, GPU),
        lambda: index.clear(rank),
        lambda: index.clear(rank, GPU),
        lambda: index.load(rank, [], 0),
        lambda: index.repair(rank, bytes(32), [], 0),
        lambda: index.apply_batch(rank, MESSAGE, 0),
        lambda: index.digest(rank, GPU),
        lambda: index.bucket_digests(rank, GPU),
        lambda: index.dump(rank),
    ):
        with pytest.raises(KeyError):
            ask()
    index.drop(rank)
    assert (index.snapshot(), index.statistics()) == before


def test_every_number_of_the_rows_is_written(index: PrefixIndex) -> None:
    index.store(2, None, PATH, HOST, 0)
    index.store(0, None, PATH[:2], GPU, 0)
    for columns in (3, 4, 70):
        out = array("i", [-7] * 4 * columns)
        assert index.match(PATH, out) == 5
        rows = [list(out[tier * columns : (tier + 1) * columns]) for tier in TIERS]
        rest = [0] * (columns - 3)
        assert rows == [[2, 0, 0, *rest], [2, 0, 5, *rest], [2, 0, 5, *rest], [2, 0, 5, *rest]]
    assert index.match([404], out) == 0
    assert set(out) == {0}


# ------------------------------------------------------------------------------------------------- unknown parents


def test_a_block_that_comes_before_its_parent_is_held_and_matches_once_the_parent_is_stored(index: PrefixIndex) -> None:
    path = chain(5)
    index.store(0, path[3], path[4:], GPU, 0)
    index.store(0, path[1], path[2:4], GPU, 0)
    index.store(1, path[1], path[2:3], GPU, 0)
    assert held(index, 0) == {block: (path[at - 1], 1) for at, block in enumerate(path) if at >= 2}
    assert (overlaps(index, path), index.children(None), index.holders(path[1])) == ({}, [path[1]], {})
    index.store(2, path[0], path[1:2], GPU, 0)
    index.store(0, None, path[:2], GPU, 0)
    assert overlaps(index, path) == {0: both(5)}
    assert index.statistics().parent_conflicts_total == 0
    assert_sound(index)


def test_a_parent_that_no_block_follows_after_all_leaves_nothing(index: PrefixIndex) -> None:
    path, other = chain(2), chain(1, seed=2)
    index.store(0, None, path, GPU, 0)
    index.store(0, other[0], path, GPU, 0)
    assert (index.statistics().nodes, index.statistics().parent_conflicts_total) == (2, 1)
    assert_sound(index)
