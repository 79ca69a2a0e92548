"""The samples that our processes show, by name, and their labels.

That real processes show the same is what `test_prometheus.py` proves, query by query.
"""

from functools import cache

from prometheus_client import CollectorRegistry

from router.metrics.request import RequestMetrics
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
OF_ENGINES = (
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:request_queue_time_seconds_bucket"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"),
    *("sglang:time_to_first_token_seconds_bucket", "sglang:queue_time_seconds_bucket"),
    *("sglang:inter_token_latency_seconds_bucket", "sglang:cache_hit_rate", "sglang:num_retracted_requests_total"),
    *("trtllm_time_to_first_token_seconds_bucket", "trtllm_request_queue_time_seconds_bucket"),
    *("trtllm_time_per_output_token_seconds_bucket", "trtllm_kv_cache_hit_rate"),
)
"""Engines' own samples, which agents show with two more labels. Sources: `docs/ATTACH.md`."""


@cache
def every_sample() -> SampleLabels:
    """Return the samples of every command, as `docs/reference/metrics.md` lists their families."""
    found: SampleLabels = {}
    for family in (family for families in COMMANDS.values() for family in families.values()):
        for suffix in _suffixes(family):
            found[family.name + suffix] = {*family.labels, *(("le",) if suffix == "_bucket" else ())}
    for name in OF_ENGINES:
        found[name] = {"worker", "model", *(("le",) if name.endswith("_bucket") else ())}
    return found


def bounds(histogram: str) -> set[float]:
    """Return the upper bounds of a histogram of requests."""
    registry = CollectorRegistry()
    RequestMetrics(registry, Bench().routing)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {float(sample.labels["le"]) for sample in samples if sample.name == f"{histogram}_bucket"}


def _suffixes(family: MadeFamily) -> tuple[str, ...]:
    return tuple(each for each in _SUFFIXES[family.kind] if each != "_sum" or family.name not in _BELOW_0)
