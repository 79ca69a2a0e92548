"""The dashboard "Engines": what attached engines measure of themselves, all three kinds side by side.

The families are the engines' own, which their agents show with the labels `worker` and `model`; an engine in the
agent's process has none. Sources of the names: `docs/ATTACH.md`.
"""

from dashboards.panels import Board, Query, panel, row
from dashboards.promql import INTERVAL, MODEL, WORKER, share

_SELECTED = f"{{{MODEL},{WORKER}}}"


def _p95(legend: str, *histograms: str) -> Query:
    """Return the 95th percentile of each worker's histogram; an engine has one of the names."""
    rates = (f"sum by (le, worker) (rate({name}_bucket{_SELECTED}[{INTERVAL}]))" for name in histograms)
    return Query(f"histogram_quantile(0.95, {' or '.join(rates)})", legend)


def _rate(counter: str) -> str:
    return f"sum by (worker) (rate({counter}{_SELECTED}[{INTERVAL}]))"


LATENCY = row(
    "How fast do the engines answer, by their own measure?",
    panel(
        "Time to first token at engines",
        "The 95th percentile by worker: vllm:time_to_first_token_seconds, "
        "sglang:time_to_first_token_seconds, trtllm_time_to_first_token_seconds. Far below that of the router: the "
        "time is lost before the engine, see the dashboard Fleet.",
        _p95("vLLM {{worker}}", "vllm:time_to_first_token_seconds"),
        _p95("SGLang {{worker}}", "sglang:time_to_first_token_seconds"),
        _p95("TensorRT-LLM {{worker}}", "trtllm_time_to_first_token_seconds"),
        unit="s",
    ),
    panel(
        "Time between tokens at engines",
        "The 95th percentile by worker: vllm:inter_token_latency_seconds (before 0.11 "
        "vllm:time_per_output_token_seconds), sglang:inter_token_latency_seconds, "
        "trtllm_time_per_output_token_seconds. One worker alone is slow: look at its GPU; all: too many requests.",
        _p95("vLLM {{worker}}", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        _p95("SGLang {{worker}}", "sglang:inter_token_latency_seconds"),
        _p95("TensorRT-LLM {{worker}}", "trtllm_time_per_output_token_seconds"),
        unit="s",
    ),
    panel(
        "Time in the engine's queue",
        "The 95th percentile by worker: vllm:request_queue_time_seconds, sglang:queue_time_seconds, "
        "trtllm_request_queue_time_seconds. Long at one worker: Routing decisions says why it gets so much; "
        "long at all: add workers.",
        _p95("vLLM {{worker}}", "vllm:request_queue_time_seconds"),
        _p95("SGLang {{worker}}", "sglang:queue_time_seconds"),
        _p95("TensorRT-LLM {{worker}}", "trtllm_request_queue_time_seconds"),
        unit="s",
    ),
)

CACHE = row(
    "What do their caches save, and do they suffice?",
    panel(
        "Hit rate, by the engines' measure",
        "vllm:prefix_cache_hits_total / vllm:prefix_cache_queries_total, sglang:cache_hit_rate, "
        "trtllm_kv_cache_hit_rate by worker. Far from the router's hit rate (the first dashboard): requests reach "
        "the engine past the router, or its predictions are wrong.",
        Query(
            share(_rate("vllm:prefix_cache_hits_total"), _rate("vllm:prefix_cache_queries_total")), "vLLM {{worker}}"
        ),
        Query(f"max by (worker) (sglang:cache_hit_rate{_SELECTED})", "SGLang {{worker}}"),
        Query(f"max by (worker) (trtllm_kv_cache_hit_rate{_SELECTED})", "TensorRT-LLM {{worker}}"),
        unit="percentunit",
    ),
    panel(
        "Preempted requests",
        "vllm:num_preemptions_total, sglang:num_retracted_requests_total by worker: running requests "
        "that lost their blocks and are computed again. Not 0 for long: the cache is too small for so many "
        "requests; lower the engine's limit of them, or add workers.",
        Query(_rate("vllm:num_preemptions_total"), "vLLM {{worker}}"),
        Query(_rate("sglang:num_retracted_requests_total"), "SGLang {{worker}}"),
        unit="cps",
    ),
)

ENGINES = Board(
    uid="kv-router-engines",
    title="KV router: engines",
    description="Attached vLLM, SGLang and TensorRT-LLM engines by their own metrics: latency, queues, hit rate, "
    "preemption.",
    rows=(LATENCY, CACHE),
)
