"""What every prefix index does with what ranks hold."""

import pytest

from indexer.index.prefix_index import Depths, PrefixIndex
from kv_protocol.events import Tier
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
    assert held(index, 0) == {}
    index.store(0, None, numbers[:1], GPU, 0)
    assert overlaps(index, numbers) == {0: both(3)}
    assert is_proven(index, 0)
    index.remove(0, numbers, GPU)
    assert index.statistics().nodes == 0
