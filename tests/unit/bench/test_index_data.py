"""The hashes that the index bench feeds, and the schedule that it makes of a trace."""

from collections.abc import Iterator

import pytest

from bench.index.data import (
    CHAIN_BLOCKS,
    ScheduledRequest,
    chain,
    events,
    last,
    numbers,
)
from bench.index.schedule import ScheduleShape, schedule
from tests.unit.bench.traces import random_trace

SHAPE = ScheduleShape(ranks=3, cache_tokens=7700, block_size=128)


def test_a_chain_is_its_seeds_and_numbers_alone_and_a_short_one_begins_a_long_one() -> None:
    assert chain(1, 2, 5) == chain(1, 2, 9)[:40]
    assert len({chain(1, 2), chain(1, 3), chain(2, 2)}) == 3


@pytest.mark.parametrize("event_blocks", [1, 8, 512])
def test_events_tell_every_chain_once_behind_its_own_past(event_blocks: int) -> None:
    chains = {number: chain(5, number) for number in range(70, 140)}
    numbers_by_block = {block: number for number, whole in chains.items() for block in numbers(whole)}
    told = dict.fromkeys(chains, b"")
    for event in events(5, range(70, 140), event_blocks, ranks=16):
        number = numbers_by_block[last(event.hashes)]
        assert (event.rank, event.start) == (number % 16, len(told[number]) // 8)
        assert event.parent == (last(told[number]) if told[number] else None)
        told[number] += event.hashes
    assert told == chains
    assert {len(hashes) for hashes in told.values()} == {8 * CHAIN_BLOCKS}


def played(seed: int, shape: ScheduleShape = SHAPE) -> Iterator[tuple[ScheduledRequest, list[int], set[int]]]:
    """Yield every request, its blocks, and what its rank has before it: a plain set, told by the schedule itself."""
    held: list[set[int]] = [set() for _ in range(shape.ranks)]
    for each in schedule(random_trace(seed, requests=120), shape):
        blocks = numbers(each.hashes)
        yield each, blocks, held[each.rank]
        held[each.rank].update(blocks)
        held[each.rank].difference_update(numbers(each.evicted))


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_hits_what_it_holds_and_holds_no_more_than_fits(seed: int) -> None:
    evicted = hits = 0
    for each, blocks, held in played(seed):
        assert each.hit == next((depth for depth, block in enumerate(blocks) if block not in held), len(blocks)), seed
        assert set(numbers(each.evicted)) <= held | set(blocks), seed
        assert len(held) <= SHAPE.cache_blocks, seed
        evicted, hits = evicted + len(each.evicted), hits + each.hit
    assert evicted
    assert hits


@pytest.mark.parametrize("seed", range(5))
def test_a_block_goes_before_its_parent(seed: int) -> None:
    parents: dict[int, int] = {}
    for each, blocks, held in played(seed):
        assert all(parents.get(block, block) in held for block in held), seed
        parents |= dict(zip(blocks[1:], blocks, strict=False))
        gone = numbers(each.evicted)
        assert all(gone.index(block) < gone.index(parents[block]) for block in gone if parents.get(block) in gone), seed
