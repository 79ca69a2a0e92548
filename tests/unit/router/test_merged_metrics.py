"""The metrics of several processes as those of one."""

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.processes.metrics import LEAST, SUMMED, merged, parsed
from tests.support.metric_families import COMMANDS

KNOWN_TO_ALL = (
    *("breaker_state", "build_info", "encoder_info", "expected_output_tokens", "freshness_seconds", "index_"),
    *(
        "journal_checkpoint_",
        "ledger_",
        "live_",
        "log_bytes",
        "log_purged_seq",
        "moments",
        "nats_server_up",
        "planner_",
    ),
    *(
        "policy_info",
        "process_up",
        "rank_trust",
        "rate_factor",
        "replica_skew_",
        "server_connections",
        "shadow_budget_seconds",
    ),
    *("snapshot_", "stream_", "worker"),
)
"""Beginnings of the names of gauges that are the same in all processes, or are those of one alone."""


class Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def process(requests: float, inflight: float, connected: float, workers: float, ttft: tuple[int, int]) -> list[Metric]:
    """Return the families of one process, as its exposition has them."""
    counted = CounterMetricFamily("kvrouter_requests", "Requests", labels=("outcome",))
    counted.add_metric(("ok",), requests)
    gauges = [
        GaugeMetricFamily("kvrouter_inflight_requests", "Now", value=inflight),
        GaugeMetricFamily("kvrouter_log_connected", "Connected", value=connected),
        GaugeMetricFamily("kvrouter_workers", "Workers", value=workers),
    ]
    below, all_of_them = ttft
    spread = HistogramMetricFamily("kvrouter_ttft_seconds", "TTFT")
    spread.add_metric((), [("0.1", below), ("+Inf", all_of_them)], all_of_them * 0.5)
    return parsed(generate_latest(Given([counted, *gauges, spread])).decode())


def samples(families: list[Metric]) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_counts_and_parts_are_summed_and_what_all_know_is_shown_once() -> None:
    both = merged([process(3, 1, 1, 4, (2, 3)), process(4, 2, 0, 5, (1, 4))])
    assert samples(both) == {
        ("kvrouter_requests_total", "ok"): 7,
        ("kvrouter_inflight_requests", ""): 3,
        ("kvrouter_log_connected", ""): 0,
        ("kvrouter_workers", ""): 5,
        ("kvrouter_ttft_seconds_bucket", "0.1"): 3,
        ("kvrouter_ttft_seconds_bucket", "+Inf"): 7,
        ("kvrouter_ttft_seconds_count", ""): 7,
        ("kvrouter_ttft_seconds_sum", ""): 3.5,
    }


def test_one_process_stays_as_it_is() -> None:
    alone = process(3, 1, 1, 4, (2, 3))
    assert generate_latest(Given(merged([alone]))) == generate_latest(Given(process(3, 1, 1, 4, (2, 3))))


def test_a_label_that_one_process_alone_has_stays() -> None:
    other = CounterMetricFamily("kvrouter_requests", "Requests", labels=("outcome",))
    other.add_metric(("failed",), 2)
    both = samples(merged([process(3, 1, 1, 4, (2, 3)), [other]]))
    assert (both["kvrouter_requests_total", "ok"], both["kvrouter_requests_total", "failed"]) == (3, 2)


def test_every_gauge_of_the_router_has_a_rule() -> None:
    gauges = {name for name, family in COMMANDS["router"].items() if family.kind == "gauge"}
    known_to_all = {name for name in gauges if name.removeprefix("kvrouter_").startswith(KNOWN_TO_ALL)}
    assert gauges == SUMMED | LEAST | known_to_all
    assert len(gauges) == len(SUMMED) + len(LEAST) + len(known_to_all)
