"""The metrics of the processes that are one router, and those of all as one: what a scrape of the router shows.

counters, histograms, summaries    the sum
gauges of `SUMMED`                 the sum: each process has a part of the whole
gauges of `LEAST`                  the least: the whole is as its worst process is
other gauges                       the greatest: all processes know the same, some a moment later than others
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kv_runtime.telemetry import Family, by_name, counter, gauge

SUMMED = frozenset(
    {
        "kvrouter_approximate_blocks",
        "kvrouter_attached_engines",
        "kvrouter_encoder_cache_bytes",
        "kvrouter_encoder_cache_segments",
        "kvrouter_http_connections",
        "kvrouter_http_connections_max",
        "kvrouter_inflight_requests",
        "kvrouter_journal_unpublished_records",
        "kvrouter_log_unconfirmed_messages",
        "kvrouter_picker_body_bytes",
        "kvrouter_picker_streams",
        "kvrouter_prompts_waiting_bytes",
        "kvrouter_queued_requests",
        "kvrouter_queued_tokens",
        "kvrouter_recent_prompts_bytes",
    }
)
LEAST = frozenset({"kvrouter_log_connected", "kvrouter_rank_fit"})


def parsed(text: str) -> list[Metric]:
    """Return the families of an exposition in Prometheus' text format.

    Raises:
        ValueError: it is none.
    """
    return list(text_string_to_metric_families(text))


def merged(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Return the families of all processes, each once, in the order in which they are found first."""
    families = dict[str, Metric]()
    samples = dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]]()
    for process in processes:
        for family in process:
            known = families.setdefault(family.name, family)
            own = samples.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = own.get(key)
                value = sample.value if before is None else _together(known, before.value, sample.value)
                own[key] = Sample(sample.name, sample.labels, value)
    for name, family in families.items():
        family.samples = list(samples[name].values())
    return list(families.values())


def _together(family: Metric, one: float, other: float) -> float:
    if family.type != "gauge" or family.name in SUMMED:
        return one + other
    return min(one, other) if family.name in LEAST else max(one, other)


class ProcessState(NamedTuple):
    """One process now. `pid` is 0 while there is none; `is_up`: it has started."""

    name: str
    pid: int
    is_up: bool
    restarts: int


def process_families(states: Iterable[ProcessState], silent_calls: Mapping[str, int]) -> Iterator[Family]:
    """Yield the metrics; `silent_calls` are those that a process did not answer, by its name."""
    known = list(states)
    up, restarts = {each.name: each.is_up for each in known}, {each.name: each.restarts for each in known}
    yield gauge("process_up", "1 while this process of the router runs", ("process",), by_name((), up))
    meaning = "How often this process ended and was started again"
    yield counter("process_restarts", meaning, ("process",), by_name((), restarts))
    meaning = "Calls of the control plane that this process did not answer"
    yield counter("process_silent_calls", meaning, ("process",), by_name((), silent_calls))
