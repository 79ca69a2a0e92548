"""The registry of a router with a worker, made of the process's families: names of samples, and their labels.

That a real process shows the same is what `test_prometheus.py` proves, query by query.
"""

from functools import cache
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kv_runtime.telemetry import LoopLag, Projection
from router.admin.metrics import (
    RequestMetrics,
    http_families,
    policy_families,
    queue_families,
    state_families,
    trust_families,
)
from router.fleet.feeds import RouterFeeds
from router.processes.metrics import process_families
from router.queue.admission import RequestQueue
from router.replicas.service import Replicas, replica_families
from router.server.plane import HttpPlane
from tests.support.metric_families import COMMANDS
from tests.unit.router.test_routing import Bench

SampleLabels = dict[str, set[str]]
"""By the name of a sample, the labels that it has somewhere; of what has no sample yet, those that it will have."""


@cache
def families_of_a_router() -> SampleLabels:
    """Return all samples that the dashboards may name: those of `router/metrics`, and of the process."""
    registry = CollectorRegistry()
    LoopLag(registry, Bench().clock)
    return families_of_the_package() | _samples(registry)


@cache
def families_of_the_package() -> SampleLabels:
    """Return the samples of `router/metrics`, of its replicas and of its processes."""
    bench, registry = Bench(), CollectorRegistry()
    feeds = RouterFeeds(bench.routing, cast("Any", None), bench.clock)
    RequestMetrics(registry, bench.state)
    Projection(registry, lambda: policy_families(bench.routing))
    Projection(registry, lambda: queue_families(RequestQueue().statistics()))
    replicas = Replicas(
        cast("Any", None), bench.clock, router_id="r0", model_of=lambda _: None, apply=lambda _, __: None
    )
    Projection(registry, lambda: http_families(HttpPlane(lambda _: None).statistics()))
    Projection(registry, lambda: replica_families(replicas))
    Projection(registry, lambda: state_families(bench.state, feeds))
    Projection(registry, lambda: trust_families(bench.routing))
    Projection(registry, lambda: process_families((), {}))
    return _samples(registry)


@cache
def every_sample() -> SampleLabels:
    """Return the samples of every command, as `docs/reference/metrics.md` lists their families."""
    found: SampleLabels = {}
    for family in (family for families in COMMANDS.values() for family in families.values()):
        for suffix in _SUFFIXES[family.kind] if family.kind != "counter" else ("",):
            labels = found.setdefault(family.name + suffix, set())
            labels |= {*family.labels, *(("le",) if suffix == "_bucket" else ())}
    return found


def bounds(histogram: str) -> set[float]:
    """Return the upper bounds of a histogram of requests."""
    registry = CollectorRegistry()
    RequestMetrics(registry, Bench().state)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {float(sample.labels["le"]) for sample in samples if sample.name == f"{histogram}_bucket"}


def _samples(registry: CollectorRegistry) -> SampleLabels:
    found: SampleLabels = {}
    for family in registry.collect():
        declared = set(getattr(family, "_labelnames", ()))
        for name in (family.name + suffix for suffix in _SUFFIXES[family.type]):
            found.setdefault(name, set(declared))
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count"), "summary": ("_sum", "_count")}
