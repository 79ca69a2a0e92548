"""The clock of the index bench: CPU time of all threads of the process, and wall time. Standard library only."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from bench.index.subjects import Call


class Timing(NamedTuple):
    """The time of a number of operations."""

    cpu_ns: int
    wall_ns: int
    operations: int

    def plus(self, other: "Timing") -> "Timing":
        """Return both together."""
        return Timing(*(left + right for left, right in zip(self, other, strict=True)))


NOTHING = Timing(0, 0, 0)


def timed(calls: Iterable[Call], operations: int) -> Timing:
    """Return the time of all calls, one after another; together they are `operations`."""
    wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
    for call in calls:
        call()
    return Timing(time.process_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns, operations)
