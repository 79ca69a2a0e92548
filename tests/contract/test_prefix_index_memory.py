"""What every prefix index does where memory is bounded, and what it says of the memory that it uses."""

from random import Random

import pytest

from indexer.index.prefix_index import RANKS_MAX, IndexFull, PrefixIndex
from kv_protocol.codec import encode_message
from kv_protocol.events import Batch, Stored, Tier
from tests.contract.indexes import (
    GPU,
    HOST,
    MakeIndex,
    assert_sound,
    both,
    chain,
    dumped,
    held,
    overlaps,
    with_ranks,
)
from tests.support.amount import examples

HASHES = chain(40_000)


def used(index: PrefixIndex) -> int:
    memory = sum(index.memory().values())
    assert index.statistics().memory_bytes == memory
    return memory


@pytest.fixture
def tight(make_index: MakeIndex) -> PrefixIndex:
    """Return an index with two ranks that has room for some of HASHES, not for all."""
    return make_tight(make_index)


def make_tight(make_index: MakeIndex) -> PrefixIndex:
    roomy = with_ranks(make_index(), 2)
    roomy.store(0, None, HASHES[:10_000], GPU, 0)
    return with_ranks(make_index(memory_bytes_max=used(roomy)), 2)


def fill(index: PrefixIndex, rank: int = 0) -> int:
    """Store more than there is room for; return how many blocks there was room for."""
    before = index.digest(rank, GPU).block_count
    refused = index.store(rank, None, HASHES, GPU, 0)
    stored = index.digest(rank, GPU).block_count
    assert 1_000 < stored - before == 40_000 - refused < 40_000
    return stored


def test_memory_grows_with_what_is_held_and_is_told_by_part(index: PrefixIndex) -> None:
    seen = [used(index)]
    for at in range(0, 40_000, 10_000):
        index.store(0, HASHES[at - 1] if at else None, HASHES[at : at + 10_000], GPU, 0)
        seen.append(used(index))
    assert seen == sorted(seen)
    assert seen[-1] >= seen[0] + 40_000 * 8
    index.clear(0)
    index.store(0, None, HASHES, GPU, 0)
    assert used(index) <= seen[-1], "what was given up is used again"
    assert all(size >= 0 for size in index.memory().values())


def test_beyond_the_limit_new_blocks_are_refused(tight: PrefixIndex) -> None:
    limit = used(tight)
    stored = fill(tight)
    assert tight.statistics().refused_blocks_total == 40_000 - stored
    assert overlaps(tight, HASHES) == {0: both(stored)}, "what there was room for is held from the first block on"
    assert used(tight) > limit
    assert_sound(tight)


def test_the_limit_is_never_passed(make_index: MakeIndex) -> None:
    for memory_bytes_max in (300_000, 600_000, 1_000_000):
        index = make_index(memory_bytes_max=memory_bytes_max)
        index.register(0)
        for at in range(0, 40_000, 500):
            index.store(0, HASHES[at - 1] if at else None, HASHES[at : at + 500], GPU, 0)
            assert used(index) <= memory_bytes_max
        index.store(0, 7, chain(5_000, seed=5), GPU, 0)
        index.store(0, None, chain(5_000, seed=6), HOST, 0)
        assert used(index) <= memory_bytes_max
        assert index.statistics().refused_blocks_total > 0


def test_removals_are_done_though_memory_is_used_up(tight: PrefixIndex) -> None:
    stored = fill(tight)
    tight.remove(0, HASHES[stored // 2 : stored], GPU)
    assert overlaps(tight, HASHES) == {0: both(stored // 2)}
    for at in range(0, stored // 2, 2):
        tight.remove(0, HASHES[at : at + 1], GPU)
    assert tight.digest(0, GPU).block_count == stored // 4
    assert tight.statistics().unknown_removals_total == 0
    assert_sound(tight)


def test_there_is_room_again_when_another_rank_is_gone(tight: PrefixIndex) -> None:
    stored = fill(tight, rank=1)
    assert tight.store(0, None, chain(20_000, seed=4), GPU, 0) > 0
    tight.drop(1)
    tight.clear(0)
    assert tight.store(0, None, HASHES[: stored // 2], GPU, 0) == 0
    assert overlaps(tight, HASHES) == {0: both(stored // 2)}


def test_of_a_dump_that_does_not_fit_a_part_is_loaded(tight: PrefixIndex, make_index: MakeIndex) -> None:
    whole = with_ranks(make_index(), 1)
    whole.store(0, None, HASHES, GPU, 0)
    refused = tight.load(1, whole.dump(0), 0)
    assert 1_000 < tight.digest(1, GPU).block_count == 40_000 - refused < 40_000
    assert tight.statistics().refused_blocks_total == refused
    assert {row.sequence_hash for row in dumped(tight, 1)} <= set(HASHES)
    assert_sound(tight)
    assert (tight.load(1, [], 0), held(tight, 1)) == (0, {})


def test_an_event_without_memory_is_told(tight: PrefixIndex) -> None:
    fill(tight)
    before = tight.statistics().refused_blocks_total
    path = chain(30_000, seed=3)
    message = encode_message([Batch(1, 1, Stored(tuple(HASHES[:5]))), Batch(1, 2, Stored(tuple(path)))])
    refused = tight.apply_batch(0, message, 0)
    assert 0 < refused == tight.statistics().refused_blocks_total - before <= 30_000


def test_a_new_rank_is_refused_when_memory_is_used_up(make_index: MakeIndex) -> None:
    limit = used(with_ranks(make_index(), 10)) + 100_000
    index = make_index(memory_bytes_max=limit)
    with pytest.raises(IndexFull):
        with_ranks(index, RANKS_MAX)
    ranks = index.statistics().ranks
    assert 10 <= ranks < RANKS_MAX
    assert used(index) <= limit
    index.register(0)  # is known
    for rank in range(ranks):
        index.drop(rank)
    index.register(RANKS_MAX - 1)
    assert index.statistics().ranks == 1


def test_a_snapshot_that_does_not_fit_changes_nothing(tight: PrefixIndex, make_index: MakeIndex) -> None:
    whole = with_ranks(make_index(), 1)
    whole.store(0, None, HASHES, GPU, 0)
    tight.store(0, None, HASHES[:1_000], GPU, 0)
    before = tight.snapshot(), tight.statistics()
    with pytest.raises(IndexFull):
        tight.restore(whole.snapshot())
    assert (tight.snapshot(), tight.statistics()) == before
    assert overlaps(tight, HASHES) == {0: both(1_000)}


def test_a_restore_fits_with_its_digests_or_is_refused(make_index: MakeIndex) -> None:
    """A block on each tier of many ranks is little beside the digests it brings."""
    whole = with_ranks(make_index(), 8)
    for rank in range(8):
        for tier in Tier:
            whole.store(rank, None, HASHES[:4], tier, 0)
    restored = refused = 0
    for memory_bytes_max in range(used(with_ranks(make_index(), 1)), used(whole) + 2_000, 1_000):
        index = make_index(memory_bytes_max=memory_bytes_max)
        try:
            index.restore(whole.snapshot())
        except IndexFull:
            refused += 1
            continue
        restored += 1
        assert used(index) <= memory_bytes_max
    assert restored > 0
    assert refused > 0


@pytest.mark.parametrize("seed", range(examples(3, least=1)))
def test_blocks_that_come_and_go_in_any_order_need_no_more_memory_than_those_that_stay(
    index: PrefixIndex, seed: int
) -> None:
    random, live, seen = Random(seed), list[tuple[int, int]](), [0]
    for operation in range(20_000):
        if len(live) < 1_500:
            rank, blocks = random.randrange(3), [random.getrandbits(64) for _ in range(random.choice([1, 2, 16]))]
            parent = random.choice(live)[1] if live and random.random() < 0.8 else None
            index.store(rank, parent, blocks, GPU, 0)
            live += ((rank, block) for block in blocks)
        else:
            for _ in range(random.choice([1, 2, 16])):
                at = random.randrange(len(live))
                live[at], live[-1] = live[-1], live[at]
                rank, block = live.pop()
                index.remove(rank, [block], GPU)
        if operation % 1_000 == 999:
            seen.append(used(index))
    assert index.statistics().held_blocks == len(live), f"seed {seed}"
    assert max(seen) <= 1.5 * max(seen[:3]), f"seed {seed}: {seen}"
    assert_sound(index)


def test_of_the_blocks_behind_a_refused_one_those_that_are_held_are_not_refused(tight: PrefixIndex) -> None:
    held_before = chain(1, seed=6)
    tight.store(0, None, held_before, GPU, 0)
    stored, refused = fill(tight), tight.statistics().refused_blocks_total
    tight.store(0, None, [*chain(9_000, seed=7), *held_before], GPU, 0)
    more = tight.digest(0, GPU).block_count - stored
    assert 0 <= more < 9_000
    assert tight.statistics().refused_blocks_total - refused == 9_000 - more


def test_a_chain_that_is_held_alike_again_has_no_more_parts_than_before(index: PrefixIndex) -> None:
    index.store(0, None, HASHES[:16], GPU, 0)
    before = index.structure()
    index.store(1, None, HASHES[:16], GPU, 0)
    for at in (5, 9, 2, 12):
        index.remove(1, HASHES[at : at + 2], GPU)
    index.remove(1, [block for block in HASHES[:16] if 1 in index.holders(block)], GPU)
    assert held(index, 1) == {}
    assert index.structure() == before
