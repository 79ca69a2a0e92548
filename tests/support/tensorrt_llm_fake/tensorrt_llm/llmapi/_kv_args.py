"""The KV cache's part of the engine's arguments.

`llm_args.py` shows these names, as the real module does; that they stand here keeps both files small. All refuse
unknown fields and wrong types with pydantic's `ValidationError`.
Source: `tensorrt_llm/llmapi/llm_args.py` @ 00043967; `block_reuse_policy`, which became `block_reuse_config` there, and
the pool rebalancing thresholds are newer than 1.3.0rc29's pages and are left out (`SURFACE.md`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator

DTYPES = {"auto", "fp8", "nvfp4", "bfloat16", "float16", "float32", "int64", "int32", "int8", "bool"}


class StrictBaseModel(BaseModel):
    """A model that refuses what it does not know; built when first used, for tests import the package often."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class MambaStateConfig(StrictBaseModel):
    """Snapshots of recurrent states."""

    periodic_snapshot_interval: NonNegativeInt = 0
    additional_snapshot_offsets_from_start: list[int] = Field(default_factory=list)
    additional_snapshot_offsets_from_end: list[int] = Field(default_factory=list)
    enable_branch_snapshot: bool = False


class KVEventsConfig(StrictBaseModel):
    """Streaming of KV events over ZMQ: each attention-DP rank binds the endpoint's port plus its rank."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = Field(default="tcp://*:5557", min_length=1)
    replay_endpoint: Annotated[str, Field(min_length=1)] | None = None
    buffer_steps: int = Field(default=10_000, gt=0)
    hwm: int = Field(default=100_000, gt=0)
    max_queue_size: int = Field(default=100_000, gt=0)
    topic: str = ""

    def model_post_init(self, context: Any, /) -> None:
        """Name the publisher, where the caller has not."""
        del context
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


class KvCacheConfig(StrictBaseModel):
    """The KV cache: sizes in tokens or bytes, `max_attention_window` in tokens for each layer in turn."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: Annotated[list[int], Field(min_length=1)] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = 0.9
    host_cache_size: int | None = None
    disk_cache_size: NonNegativeInt | None = None
    disk_cache_path: str | None = None
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    kv_events_config: KVEventsConfig | None = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: NonNegativeInt = 0
    iteration_stats_interval: PositiveInt = 1
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    mamba_ssm_stochastic_rounding: bool = False
    mamba_ssm_philox_rounds: int = Field(default=10, ge=1)
    tokens_per_block: int = 32
    mamba_state_cache_interval: NonNegativeInt | None = None
    mamba_state_config: MambaStateConfig = Field(default_factory=MambaStateConfig)
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    enable_swa_scratch_reuse: bool = False
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"
    max_util_for_resume: float = Field(default=0.95, gt=0, le=1)
    enable_kv_pool_rebalance: bool = False
    disk_prefetch_num_reqs: NonNegativeInt = 0
    pool_ratio: Annotated[list[float], Field(min_length=1)] | None = None
    avg_seq_len: PositiveInt | None = None

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: str) -> str:
        if value.lower() not in DTYPES:
            raise ValueError('kv_cache_config.dtype must be one of "auto", "fp8", "nvfp4", or valid torch.dtype string')
        return value.lower()

    @field_validator("max_attention_window")
    @classmethod
    def _check_windows(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and any(window <= 0 for window in value):
            raise ValueError("kv_cache_config.max_attention_window values must be positive")
        return value


class CacheTransceiverConfig(StrictBaseModel):
    """How a context worker's KV blocks come to a generation worker; without a backend they do not."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = "auto"
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: PositiveInt | None = 60_000
    kv_transfer_sender_future_timeout_ms: PositiveInt | None = 1_000
    kv_transfer_poll_interval_ms: PositiveInt | None = 5_000
    kv_cache_bounce_size_mb: NonNegativeInt = 0
    enable_pipelined_transfer: bool = False
