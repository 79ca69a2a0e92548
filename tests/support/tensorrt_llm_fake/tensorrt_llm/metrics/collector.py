"""Counts for Prometheus, registered for the whole process: a second collector in one process is refused.

Source: SURFACE.md, J. Of the families the fake has those of `_MetricNames`, and of iterations two.
"""

from enum import Enum
from typing import Any

from prometheus_client import Counter, Gauge, Histogram


class _MetricNames(Enum):
    """What a request's `metrics_dict` has, those that the fake measures; the real one's name has no underscore."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    REQUEST_QUEUE_TIME = "request_queue_time"


class MetricsCollector:
    """What `labels` name, counted."""

    labelname_finish_reason = "finished_reason"

    def __init__(
        self,
        labels: dict[str, str],
        e2e_request_latency_buckets: list[float] | None = None,
        time_to_first_token_buckets: list[float] | None = None,
        time_per_output_token_buckets: list[float] | None = None,
        request_queue_time_buckets: list[float] | None = None,
        request_prefill_time_buckets: list[float] | None = None,
        request_decode_time_buckets: list[float] | None = None,
        request_inference_time_buckets: list[float] | None = None,
    ) -> None:
        for each in (request_prefill_time_buckets, request_decode_time_buckets, request_inference_time_buckets):
            assert each is None
        self.labels = labels
        names = tuple(labels)
        reason = self.labelname_finish_reason
        self.counter_request_success = Counter("trtllm_request_success_total", "Requests.", (*names, reason))

        def histogram(name: str, buckets: list[float] | None) -> Histogram:
            return Histogram(f"trtllm_{name}_seconds", "Seconds.", names, buckets=buckets or (0.001, 0.1, 1.0, 10.0))

        self.histogram_e2e_time_request = histogram("e2e_request_latency", e2e_request_latency_buckets)
        self.histogram_time_to_first_token = histogram("time_to_first_token", time_to_first_token_buckets)
        self.histogram_time_per_output_token = histogram("time_per_output_token", time_per_output_token_buckets)
        self.histogram_queue_time_request = histogram("request_queue_time", request_queue_time_buckets)
        self.num_requests_running = Gauge("trtllm_num_requests_running", "Active requests.", names)
        self.kv_cache_utilization = Gauge("trtllm_kv_cache_utilization", "Used share of the cache.", names)

    def log_request_metrics_dict(self, metrics_dict: dict[Any, Any]) -> None:
        """Count a request that is over: one with a reason."""
        reason = metrics_dict.get(self.labelname_finish_reason)
        if not reason:
            return
        self.counter_request_success.labels(**self.labels, **{self.labelname_finish_reason: reason}).inc()
        for name, histogram in (
            (_MetricNames.E2E, self.histogram_e2e_time_request),
            (_MetricNames.TTFT, self.histogram_time_to_first_token),
            (_MetricNames.TPOT, self.histogram_time_per_output_token),
            (_MetricNames.REQUEST_QUEUE_TIME, self.histogram_queue_time_request),
        ):
            if name in metrics_dict:
                histogram.labels(**self.labels).observe(metrics_dict[name])

    def log_iteration_stats(self, iteration_stats: dict[str, Any]) -> None:
        """Show an iteration."""
        self.num_requests_running.labels(**self.labels).set(iteration_stats["numActiveRequests"])
        cache = iteration_stats["kvCacheStats"]
        self.kv_cache_utilization.labels(**self.labels).set(cache["usedNumBlocks"] / cache["maxNumBlocks"])
