"""Statistics of one iteration of one rank, in TensorRT-LLM's JSON shape, as far as they are read.

Counts of requests and blocks are those at the end of the iteration, so the last one before idleness shows no load. With
several ranks every row is its own rank's, block counts and queue included, where TensorRT-LLM copies the base row's.
With several windows the block counts are the widest pool's. Source: `docs/SOURCES.md` E1.7.
"""

import msgspec


class KvCacheStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The block pool."""

    max_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int


class InflightBatchingStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the iteration computed, and what waits; the simulated engine never pauses a request."""

    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int = 0
    num_ctx_tokens: int
    num_ctx_kv_tokens: int
    num_gen_kv_tokens: int
    num_queued_context_requests: int
    num_queued_ctx_tokens: int
    num_queued_gen_requests: int = 0
    num_queued_gen_kv_tokens: int = 0
    num_paused_kv_tokens: int = 0


class IterationStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One row. `iter` and its duration are the engine's, which all ranks have in common."""

    iter: int = 0
    iter_latency_ms: float = msgspec.field(name="iterLatencyMS", default=0.0)
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    attention_dp_rank: int | msgspec.UnsetType = msgspec.UNSET
