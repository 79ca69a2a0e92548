"""What the event bench feeds."""

import pytest

from bench.events.load import SEQUENCE_BLOCKS, EventLoad, engine_events, schedule
from worker_agent.events.engine_events import EngineStored

LOAD = EventLoad(seed=3, blocks=3 * SEQUENCE_BLOCKS + 10, event_blocks=8, block_size=4)


def hashes(events: list[EngineStored]) -> list[int]:
    return [each for event in events for each in event.block_hashes]


@pytest.mark.parametrize("event_blocks", [1, 8, 60, 512])
def test_a_load_tells_of_each_of_its_blocks_once(event_blocks: int) -> None:
    told = hashes(list(engine_events(LOAD._replace(event_blocks=event_blocks))))
    assert len(told) == len(set(told)) == LOAD.blocks


def test_an_event_follows_the_last_block_that_was_told_of_its_sequence() -> None:
    last: dict[int, int] = {}
    for event in engine_events(LOAD):
        sequence = (event.block_hashes[0] - 1) // SEQUENCE_BLOCKS
        assert event.parent_block_hash == last.get(sequence)
        last[sequence] = event.block_hashes[-1]


@pytest.mark.parametrize(("blocks_s", "period_s"), [(100.0, 0.08), (40_000.0, 0.02)])
def test_a_schedule_tells_all_blocks_at_the_rate_that_is_asked(blocks_s: float, period_s: float) -> None:
    flushes = schedule(LOAD, blocks_s)
    assert [event for flush in flushes for event in flush.events] == list(engine_events(LOAD))
    told = 0
    for flush in flushes:
        told += len(hashes(list(flush.events)))
        assert told <= flush.after_s * blocks_s + 1e-6
        assert told > (flush.after_s - period_s) * blocks_s - LOAD.event_blocks
