"""What the agent shows of an engine's own metrics, as Prometheus reads it from the agent again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from worker_agent.attached.watch import TEXT_BYTES_MAX, engine_families

OURS = {"worker": "w", "model": "m"}


class Families(Collector):
    """A registry's view of what the agent shows."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def shown(text: str | bytes) -> dict[tuple[str, str], float]:
    """Return the series that Prometheus reads from the agent: name, labels that are not ours; value."""
    families = engine_families("vllm:", text if isinstance(text, bytes) else text.encode(), OURS)
    assert not isinstance(families, str), families
    registry = CollectorRegistry()
    registry.register(Families(families))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.items() >= OURS.items()
            rest = ",".join(f"{name}={value}" for name, value in sample.labels.items() if name not in OURS)
            found[sample.name, rest] = sample.value
    return found


def test_counters_and_histograms_are_shown_as_the_engine_has_them() -> None:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Prompt tokens.", ["engine"], registry=registry).labels("0").inc(7)
    Histogram("vllm:ttft_seconds", "TTFT.", buckets=(0.1, 1), registry=registry).observe(0.5)
    assert shown(generate_latest(registry)) == {
        ("vllm:prompt_tokens_total", "engine=0"): 7,
        ("vllm:ttft_seconds_bucket", "le=0.1"): 0,
        ("vllm:ttft_seconds_bucket", "le=1.0"): 1,
        ("vllm:ttft_seconds_bucket", "le=+Inf"): 1,
        ("vllm:ttft_seconds_count", ""): 1,
        ("vllm:ttft_seconds_sum", ""): 0.5,
    }


def test_a_label_that_is_ours_is_renamed_as_prometheus_does() -> None:
    assert shown('vllm:a{worker="x",pid="1"} 1') == {("vllm:a", "exported_worker=x,pid=1"): 1}


@pytest.mark.parametrize(
    "line", ["python_info 1", "process_cpu_seconds_total 1", "kvrouter_requests_total 1", "# rest"]
)
def test_families_without_the_engines_prefix_are_not_shown(line: str) -> None:
    assert shown(f"{line}\nvllm:a 1\n") == {("vllm:a", ""): 1}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"vllm:a one", "unreadable"),
        (b'vllm:a{p="x} 1', "unreadable"),
        (b"vllm:a 1\n" + b"#" * TEXT_BYTES_MAX, "oversize"),
    ],
)
def test_what_cannot_be_shown_has_a_reason(body: bytes, problem: str) -> None:
    assert engine_families("vllm:", body, OURS) == problem


PIECES = st.sampled_from(
    [
        *("vllm:", "a", "_total", "_bucket", "{", "}", '"', "\\", "=", ",", " ", "\n", "# TYPE ", "# HELP "),
        *("histogram", "counter", "1", "NaN", "+Inf", "le", "worker", "\0", "é", "\x85", "\r"),
    ]
)


@given(st.lists(PIECES, max_size=60).map("".join).map(str.encode) | st.binary(max_size=200))
def test_hostile_text_never_harms_the_agents_own_metrics(body: bytes) -> None:
    families = engine_families("vllm:", b"vllm:" + body, OURS)
    registry = CollectorRegistry()
    Counter("kvrouter_own", "Ours.", registry=registry)
    registry.register(Families([] if isinstance(families, str) else families))
    lines = generate_latest(registry).decode().splitlines()
    assert "kvrouter_own_total 0.0" in lines
