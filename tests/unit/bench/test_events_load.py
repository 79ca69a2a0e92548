"""What the event bench feeds."""

import pytest

from bench.events.load import SEQUENCE_BLOCKS, SIDE_BY_SIDE, EventLoad, Flush, engine_events, payloads, schedule
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.dialects.batches import BatchDecoder
from worker_agent.events.engine_events import EngineStored

LOAD = EventLoad(seed=3, blocks=3 * SEQUENCE_BLOCKS + 10, event_blocks=8, block_size=4)


def hashes(events: list[EngineStored]) -> list[int]:
    return [each for event in events for each in event.block_hashes]


@pytest.mark.parametrize("event_blocks", [1, 8, 60, 512])
def test_a_load_tells_of_each_of_its_blocks_once(event_blocks: int) -> None:
    told = hashes(list(engine_events(LOAD._replace(event_blocks=event_blocks))))
    assert len(told) == len(set(told)) == LOAD.blocks


def test_the_same_seed_tells_the_same_and_another_tells_of_other_blocks() -> None:
    assert list(engine_events(LOAD)) == list(engine_events(LOAD))
    assert not set(hashes(list(engine_events(LOAD)))) & set(hashes(list(engine_events(LOAD._replace(seed=4)))))


def test_an_event_follows_the_last_block_that_was_told_of_its_sequence() -> None:
    last: dict[int, int] = {}
    for event in engine_events(LOAD):
        sequence = (event.block_hashes[0] - 1) // SEQUENCE_BLOCKS
        assert event.parent_block_hash == last.get(sequence)
        last[sequence] = event.block_hashes[-1]


def test_sequences_grow_side_by_side() -> None:
    load = EventLoad(seed=1, blocks=20 * SEQUENCE_BLOCKS, event_blocks=8, block_size=1)
    firsts = [event.block_hashes[0] for event in engine_events(load)]
    begun = [(first - 1) // SEQUENCE_BLOCKS % (1 << 20) for first in firsts[: SIDE_BY_SIDE + 1]]
    assert len(set(begun)) == SIDE_BY_SIDE


def test_an_agent_makes_one_batch_of_each_event() -> None:
    core = Consolidation((0,), LOAD.block_size, "i", lambda: 7)
    for sequence, payload in enumerate(payloads(engine_events(LOAD), 8)):
        core.on_payload(sequence, payload)
    rank = core.statistics().ranks[0]
    assert (rank.held_blocks, rank.last_seq) == (LOAD.blocks, len(list(engine_events(LOAD))))
    assert core.stale(0) == ""


def test_payloads_have_so_many_events_each_and_say_when_they_were_made() -> None:
    made = list(payloads(engine_events(LOAD), 100, dp_rank=2, time_s=5.0))
    read = [BatchDecoder().decode(sequence, payload) for sequence, payload in enumerate(made)]
    assert [len(batch.events) for batch in read] == [100, len(list(engine_events(LOAD))) - 100]
    assert {(batch.dp_rank, batch.time_s) for batch in read} == {(2, 5.0)}


@pytest.mark.parametrize(("blocks_s", "period_s"), [(100.0, 0.08), (40_000.0, 0.02)])
def test_a_schedule_tells_all_blocks_at_the_rate_that_is_asked(blocks_s: float, period_s: float) -> None:
    flushes = schedule(LOAD, blocks_s)
    assert [event for flush in flushes for event in flush.events] == list(engine_events(LOAD))
    told = 0
    for flush in flushes:
        told += len(hashes(list(flush.events)))
        assert told <= flush.after_s * blocks_s + 1e-6
        assert told > (flush.after_s - period_s) * blocks_s - LOAD.event_blocks


def test_a_slow_engine_flushes_each_event_by_itself() -> None:
    flushes = schedule(EventLoad(1, 16, 8, 1), 100.0)
    assert [(flush.after_s, len(flush.events)) for flush in flushes] == [(0.08, 1), (0.16, 1)]
    assert isinstance(flushes[0], Flush)
