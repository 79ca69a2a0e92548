"""TensorRT-LLM's own server, `trtllm-serve`. The package `worker_agent.engines.trtllm` runs the engine in the agent.

Source: NVIDIA/TensorRT-LLM, in `tensorrt_llm/`: `serve/openai_server.py` at 00057725d9a6, `metrics/collector.py` at
050f80def8df; iteration statistics: `docs/SOURCES.md` E1.7.
"""

from typing import Any, ClassVar

from kv_protocol.ids import BLOCK_SIZE_MAX
from worker_agent.engines.servers.base import (
    KV_BLOCKS_MAX,
    POLL,
    SEQS_MAX,
    TOKENS_MAX,
    EngineFacts,
    EngineServer,
    Info,
    MetricNames,
    decoded,
    facts_of_version,
    within,
)


def facts_of_metrics(body: bytes) -> EngineFacts:
    """Return the facts of the newest row of iteration statistics."""
    row = (TrtllmServe().iterations(body) or [{}])[-1]
    cache = row.get("kvCacheStats")
    fields = cache if isinstance(cache, dict) else {}
    return EngineFacts(
        block_size=within(fields.get("tokensPerBlock"), BLOCK_SIZE_MAX),
        total_kv_blocks=within(fields.get("maxNumBlocks"), KV_BLOCKS_MAX),
        max_num_seqs=within(row.get("maxBatchSizeStatic"), SEQS_MAX),
        max_num_batched_tokens=within(row.get("maxNumTokensStatic"), TOKENS_MAX),
    )


class TrtllmServe(EngineServer):
    """Start it with `kv_cache_config.event_buffer_max_size`, block reuse, and `enable_iter_perf_stats`.

    No other client may ask `/kv_cache_events` or `/metrics`: each answer removes what it returns, and an engine without
    rows of statistics seems idle. Answers to both may take 5 s. Newer versions have metrics as Prometheus text: the
    agent shows them if `engine.metrics_path` is their path. With attention DP the engine chooses a request's rank.

    An agent that starts later than the engine, or restarts, never sees the `created` events: until an event of the
    widest window comes, the widest that came counts, unless `events.attention_window` states it.
    """

    name: ClassVar = "trtllm-serve"
    owned_by: ClassVar = "tensorrt_llm"
    event_source: ClassVar = "trtllm"
    events: ClassVar = POLL
    block_size: ClassVar = 32
    metrics: ClassVar = MetricNames(
        prefix="trtllm_",
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        usage=("trtllm_kv_cache_utilization",),
        used_blocks="trtllm_kv_cache_used_blocks",
        total_blocks="trtllm_kv_cache_max_blocks",
    )
    metrics_answer_s: ClassVar = 5.0  # older versions wait 2 s for rows of statistics, and for events
    info: ClassVar = (Info(facts_of_metrics), Info(facts_of_version, ("/version",)))

    def iterations(self, body: bytes) -> list[dict[str, Any]] | None:
        """Return the rows of a JSON list of objects; None if the body does not begin with "[", as Prometheus text.

        Raises:
            MalformedMessage: the body begins with "[", and is not such a list.
        """
        return decoded(list[dict[str, Any]], body, "/metrics") if body.lstrip()[:1] == b"[" else None
