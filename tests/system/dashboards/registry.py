"""The samples that our processes show, by name, and their labels.

That real processes show the same is what `test_prometheus.py` proves, query by query.
"""

from functools import cache

from prometheus_client import CollectorRegistry

from router.admin.metrics import RequestMetrics
from tests.support.metric_families import COMMANDS, MadeFamily
from tests.unit.router.test_routing import Bench

SampleLabels = dict[str, set[str]]
"""By the name of a sample, the labels that it has."""
_SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_sum", "_count"),
}
_BELOW_0 = {"kvrouter_prediction_error_tokens"}
"""Histograms of what can be negative: they have no sum."""


@cache
def every_sample() -> SampleLabels:
    """Return the samples of every command, as `docs/reference/metrics.md` lists their families."""
    found: SampleLabels = {}
    for family in (family for families in COMMANDS.values() for family in families.values()):
        for suffix in _suffixes(family):
            found[family.name + suffix] = {*family.labels, *(("le",) if suffix == "_bucket" else ())}
    return found


def bounds(histogram: str) -> set[float]:
    """Return the upper bounds of a histogram of requests."""
    registry = CollectorRegistry()
    RequestMetrics(registry, Bench().state)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {float(sample.labels["le"]) for sample in samples if sample.name == f"{histogram}_bucket"}


def _suffixes(family: MadeFamily) -> tuple[str, ...]:
    return tuple(each for each in _SUFFIXES[family.kind] if each != "_sum" or family.name not in _BELOW_0)
