"""The metrics of the processes that are one router; a router in one process has one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kv_runtime.telemetry import Family, by_name, counter, gauge


class ProcessState(NamedTuple):
    """One process now. `pid` is 0 while there is none; `is_up`: it has started."""

    name: str
    pid: int
    is_up: bool
    restarts: int


def process_families(states: Iterable[ProcessState], silent_calls: Mapping[str, int]) -> Iterator[Family]:
    """Yield the metrics; `silent_calls` are those that a process did not answer, by its name."""
    known = list(states)
    up = [((state.name,), float(state.is_up)) for state in known]
    restarts = [((state.name,), float(state.restarts)) for state in known]
    silent = by_name((), silent_calls)
    yield gauge("process_up", "1 while this process of the router runs", ("process",), up)
    yield counter("process_restarts", "How often this process ended and was started again", ("process",), restarts)
    yield counter(
        "process_silent_calls", "Calls of the control plane that this process did not answer", ("process",), silent
    )
