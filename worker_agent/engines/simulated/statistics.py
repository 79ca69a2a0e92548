"""Statistics of one iteration of one rank, in TensorRT-LLM's JSON shape.

Counts of requests and blocks are those at the end of the iteration, so the last one before idleness shows no load.
`freeNumBlocks` counts cached blocks, which an allocation may take. With several ranks every row is its own rank's,
block counts and queue included, where TensorRT-LLM copies the base row's. With several windows the block counts are the
widest pool's. `requestStats`, which TensorRT-LLM reports only on request, is left out.
Source: `docs/SOURCES.md` E1.7.
"""

import msgspec

from worker_agent.engines.simulated.blocks import PoolStatistics
from worker_agent.port.types import EngineDescription


class KvCacheStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The block pool; the last five count from the engine's start."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int
    cache_hit_rate: float


class InflightBatchingStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the iteration computed, and what waits; the simulated engine never pauses a request."""

    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int = 0
    num_ctx_tokens: int
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float
    num_ctx_kv_tokens: int
    num_gen_kv_tokens: int
    num_queued_context_requests: int
    num_queued_ctx_tokens: int
    num_queued_gen_requests: int = 0
    num_queued_gen_kv_tokens: int = 0
    num_paused_kv_tokens: int = 0


class PoolMemory(msgspec.Struct, frozen=True):
    """What the pools of one rank take, in bytes: on the GPU, and of pinned memory on the host."""

    gpu_bytes: int
    pinned_bytes: int


class IterationStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One row. `timestamp` is the iteration's start in engine seconds, in decimal; there is no calendar here.

    There is no tuner: its recommendations are 0. The host waits for the device, so a host step, a device step and a
    forward pass take an iteration. `stats_sequence` numbers a rank's rows; `stats_dropped_frames` counts dropped rows.
    """

    timestamp: str
    iter: int
    iter_latency_ms: float = msgspec.field(name="iterLatencyMS")
    new_active_requests_queue_latency_ms: float = msgspec.field(name="newActiveRequestsQueueLatencyMS")
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    max_num_active_requests: int
    max_batch_size_static: int
    max_batch_size_tuner_recommended: int = 0
    max_batch_size_runtime: int
    max_num_tokens_static: int
    max_num_tokens_tuner_recommended: int = 0
    max_num_tokens_runtime: int
    gpu_mem_usage: int
    cpu_mem_usage: int = 0
    pinned_mem_usage: int
    kv_cache_stats: KvCacheStats
    static_batching_stats: None = None
    inflight_batching_stats: InflightBatchingStats
    spec_decoding_stats: None = None
    host_step_time_ms: float = msgspec.field(name="hostStepTimeMS")
    prev_device_step_time_ms: float = msgspec.field(name="prevDeviceStepTimeMS")
    gpu_forward_time_ms: float = msgspec.field(name="gpuForwardTimeMS")
    scheduler_mode: str = "GUARANTEED_NO_EVICT"
    stats_sequence: int
    stats_dropped_frames: int = 0
    rank: int
    attention_dp_rank: int | msgspec.UnsetType = msgspec.UNSET


class RankIteration(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did in one iteration, and its state at the iteration's end."""

    context_requests: int
    context_tokens: int
    context_kv_tokens: int
    decode_requests: int
    decode_kv_tokens: int
    new_requests: int
    queue_latency_s: float
    completed_requests: int
    active_requests: int
    waiting_requests: int
    waiting_tokens: int
    pool: PoolStatistics


def iteration_stats(
    did: RankIteration,
    engine: EngineDescription,
    memory: PoolMemory,
    *,
    now_s: float,
    iteration: int,
    duration_s: float,
    before_s: float,
    attention_dp_rank: int | msgspec.UnsetType,
) -> IterationStats:
    """Return the row of an iteration that began at `now_s` and lasts `duration_s`, after one of `before_s`."""
    return IterationStats(
        timestamp=f"{now_s:.6f}",
        iter=iteration,
        iter_latency_ms=duration_s * 1e3,
        new_active_requests_queue_latency_ms=did.queue_latency_s * 1e3,
        num_new_active_requests=did.new_requests,
        num_active_requests=did.active_requests,
        num_queued_requests=did.waiting_requests,
        num_completed_requests=did.completed_requests,
        max_num_active_requests=engine.max_num_seqs,
        max_batch_size_static=engine.max_num_seqs,
        max_batch_size_runtime=engine.max_num_seqs,
        max_num_tokens_static=engine.max_num_batched_tokens,
        max_num_tokens_runtime=engine.max_num_batched_tokens,
        gpu_mem_usage=memory.gpu_bytes,
        pinned_mem_usage=memory.pinned_bytes,
        kv_cache_stats=_kv_cache_stats(did.pool, engine),
        inflight_batching_stats=_inflight_batching_stats(did),
        host_step_time_ms=duration_s * 1e3,
        prev_device_step_time_ms=before_s * 1e3,
        gpu_forward_time_ms=duration_s * 1e3,
        stats_sequence=iteration,
        rank=0 if attention_dp_rank is msgspec.UNSET else attention_dp_rank,
        attention_dp_rank=attention_dp_rank,
    )


def _kv_cache_stats(pool: PoolStatistics, engine: EngineDescription) -> KvCacheStats:
    prompted_blocks = pool.reused_blocks + pool.missed_blocks
    return KvCacheStats(
        max_num_blocks=engine.total_kv_blocks,
        free_num_blocks=pool.free_blocks + pool.cached_blocks,
        used_num_blocks=pool.used_blocks,
        tokens_per_block=engine.block_size,
        alloc_total_blocks=pool.alloc_total_blocks,
        alloc_new_blocks=pool.alloc_new_blocks,
        reused_blocks=pool.reused_blocks,
        missed_blocks=pool.missed_blocks,
        cache_hit_rate=pool.reused_blocks / prompted_blocks if prompted_blocks else 0.0,
    )


def _inflight_batching_stats(did: RankIteration) -> InflightBatchingStats:
    return InflightBatchingStats(
        num_scheduled_requests=did.context_requests + did.decode_requests,
        num_context_requests=did.context_requests,
        num_gen_requests=did.decode_requests,
        num_ctx_tokens=did.context_tokens,
        avg_num_decoded_tokens_per_iter=1.0 if did.decode_requests else 0.0,
        num_ctx_kv_tokens=did.context_kv_tokens,
        num_gen_kv_tokens=did.decode_kv_tokens,
        num_queued_context_requests=did.waiting_requests,
        num_queued_ctx_tokens=did.waiting_tokens,
    )
