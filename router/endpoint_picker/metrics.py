"""Metrics of the endpoint picker."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from kv_runtime.telemetry import Family, counter, gauge

Outcome = Literal["placed", "answered", "refused", "left"]
"""A worker was named; the picker answered itself; it answered with an error; the gateway gave up before that."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class PickerStatistics(msgspec.Struct):
    """The present streams, and totals since the start."""

    streams: int = 0
    body_bytes: int = 0
    outcomes: Counter[Outcome] = msgspec.field(default_factory=Counter)
    moved: int = 0
    failed: int = 0


def picker_families(statistics: PickerStatistics) -> Iterator[Family]:
    """Yield the picker's families; without a picker they are 0."""
    yield gauge("picker_streams", "Requests of gateways that are read or served now", rows=[((), statistics.streams)])
    yield gauge("picker_body_bytes", "Bytes of their bodies in memory", rows=[((), statistics.body_bytes)])
    by_outcome = [((each,), float(statistics.outcomes[each])) for each in OUTCOMES]
    yield counter(
        "picker_requests",
        "Requests of gateways, by what the picker said: placed, answered, refused, or left before it said anything",
        ("outcome",),
        by_outcome,
    )
    moved = [((), float(statistics.moved))]
    yield counter("picker_served_elsewhere", "Requests that another worker than the picked one answered", (), moved)
    failed = [((), float(statistics.failed))]
    yield counter(
        "picker_failed_streams", "Streams that ended by a defect, of the gateway or of the router", (), failed
    )
