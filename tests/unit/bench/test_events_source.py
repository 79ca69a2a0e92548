"""The engine that the event bench plays: what it tells of, and when."""

from bench.events.load import EventLoad, schedule
from bench.events.source import ScheduledEngine
from worker_agent.events.engine_events import RankEvent

FLUSHES = schedule(EventLoad(1, 64, 8, 1), 400.0)
BEGAN_NS = 1_000_000_000


def test_an_engine_that_has_not_begun_tells_of_nothing() -> None:
    engine = ScheduledEngine(FLUSHES)
    assert engine.take(0.0) == []
    assert not engine.is_over


def test_what_is_due_is_told_at_once_and_was_flushed_when_it_was_due() -> None:
    engine = ScheduledEngine(FLUSHES)
    engine.begin(BEGAN_NS)
    assert engine.take(0.0) == [RankEvent(0, event) for flush in FLUSHES for event in flush.events]
    assert engine.flushed_ns == [BEGAN_NS + 20_000_000 * number for number in range(1, 9)]
    assert engine.is_over
    assert engine.take(0.0) == []


def test_what_is_not_due_is_not_told() -> None:
    engine = ScheduledEngine(FLUSHES)
    engine.begin(1 << 62)
    assert engine.take(0.0) == []
