"""The results of a run of the event bench, by group; a group that was not requested is None."""

from typing import Any, NamedTuple

from bench.events.cold import Cold
from bench.events.freshness import Freshness
from bench.events.heartbeats import HeartbeatResults
from bench.events.recovery import Recovery
from bench.events.throughput import Throughput


class EventResults(NamedTuple):
    """All results, by the names of the groups."""

    freshness: list[Freshness] | None = None
    throughput: list[Throughput] | None = None
    cold: Cold | None = None
    recovery: list[Recovery] | None = None
    pulse: HeartbeatResults | None = None


def as_plain(value: Any) -> Any:  # noqa: ANN401 - whatever a result is made of
    """Return the same with a dict for each named tuple, for JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: as_plain(each) for name, each in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return value
