"""The engine's arguments: names, types, defaults, and what is refused together.

| value | exception |
|---|---|
| an unknown field of a nested configuration, a wrong type, a value out of range | `pydantic.ValidationError` |
| an unknown keyword of `LLM` | `ValueError`, by `LLM` itself, before this module sees it |

Nested configurations keep their identity: pydantic takes an instance as it is, and nothing here copies one. `Opaque`
fields take anything: the agent passes them on, and the fake does nothing with them. There are the fields that the
agent, its engine files and tests use; any other is refused.
Source: `tensorrt_llm/llmapi/llm_args.py` @ 00043967, classes BaseLlmArgs and TorchLlmArgs (`SURFACE.md`).
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, PrivateAttr, field_validator
from pydantic import model_validator as validator

from .._fake.control import control
from ..logger import logger

Opaque = Any
DTYPES = {"auto", "fp8", "nvfp4", "bfloat16", "float16", "float32", "int64", "int32", "int8", "bool"}
NORMALISED = ("max_batch_size", "max_beam_width", "max_num_tokens")


class CapacitySchedulerPolicy(StrEnum):
    """Which requests run when blocks are short."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class WaitingQueuePolicy(StrEnum):
    """Whose turn it is."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class LoadFormat(Enum):
    """Where weights come from."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2
    GMS = 3


class StrictBaseModel(BaseModel):
    """A model that refuses what it does not know; built when first used, for tests import the package often."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class KVEventsConfig(StrictBaseModel):
    """Streaming of KV events over ZMQ: each attention-DP rank binds the endpoint's port plus its rank."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = Field(default="tcp://*:5557", min_length=1)
    replay_endpoint: Annotated[str, Field(min_length=1)] | None = None
    hwm: int = Field(default=100_000, gt=0)
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
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = 0.9
    event_buffer_max_size: int = 0
    kv_events_config: KVEventsConfig | None = None
    enable_partial_reuse: bool = True
    dtype: str = "auto"
    tokens_per_block: int = 32
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"

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
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: PositiveInt | None = 60_000


class DynamicBatchConfig(StrictBaseModel):
    """Batch sizes that follow the load."""

    dynamic_batch_moving_average_window: int = 128


class SchedulerConfig(StrictBaseModel):
    """The scheduler."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    dynamic_batch_config: DynamicBatchConfig | None = None
    waiting_queue_policy: WaitingQueuePolicy = WaitingQueuePolicy.FCFS


class CudaGraphConfig(StrictBaseModel):
    """CUDA graphs of decode batches. Which sizes are made where none is given is not modelled."""

    max_batch_size: NonNegativeInt = 0
    enable_padding: bool = False
    mode: Literal["decode"] = "decode"


class AttentionDpConfig(StrictBaseModel):
    """Balance between attention-DP ranks."""

    enable_balance: bool = False


class MoeConfig(StrictBaseModel):
    """Mixture of experts."""

    backend: Literal[
        "AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
        "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL",
    ] = "AUTO"  # fmt: skip
    max_num_tokens: int | None = None
    load_balancer: Opaque = None


class DecodingBaseConfig(StrictBaseModel):
    """What all kinds of speculative decoding have."""

    max_draft_len: NonNegativeInt | None = None
    speculative_model: str | Path | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None


class Eagle3DecodingConfig(DecodingBaseConfig):
    """Eagle3, with its draft as a part of the model: `eagle3_one_model` of older candidates is gone."""

    decoding_type: Literal["Eagle3"] = "Eagle3"


class MTPDecodingConfig(DecodingBaseConfig):
    """Multi-token prediction by layers of the model."""

    decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int | None = None


class KvCacheConnectorConfig(StrictBaseModel):
    """A second owner of KV blocks: by name, or by module and classes. Older versions know no names."""

    connector: str | None = None
    connector_module: str | None = None
    connector_scheduler_class: str | None = None
    connector_worker_class: str | None = None


class ParallelConfig:
    """How many processes, and on how many GPUs of a node."""

    def __init__(self, tp_size: int, pp_size: int, cp_size: int, gpus_per_node: int) -> None:
        self.tp_size, self.pp_size, self.cp_size, self.gpus_per_node = tp_size, pp_size, cp_size, gpus_per_node

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def world_size_per_node(self) -> int:
        """Return the number of processes on each node."""
        return self.world_size // -(-self.world_size // max(1, self.gpus_per_node))

    @property
    def is_multi_gpu(self) -> bool:
        """Return whether there is more than one process."""
        return self.world_size > 1


class TorchLlmArgs(StrictBaseModel):
    """The arguments of the backend `pytorch`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    model: str | Path
    tokenizer: Opaque = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    model_kwargs: dict[str, Any] | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = Field(default=None, validate_default=True)
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    cp_config: Opaque = None
    load_format: str | LoadFormat = LoadFormat.AUTO
    enable_lora: bool = False
    lora_config: Opaque = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    iter_stats_max_iterations: Annotated[int, Field(ge=-1)] | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    speculative_config: Opaque = None
    max_batch_size: int | None = 2048
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    num_postprocess_workers: int = 0
    otlp_traces_endpoint: str | None = None
    return_perf_metrics: bool = False
    env_overrides: dict[str, str] | None = None
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    enable_iter_perf_stats: bool = False
    stream_interval: PositiveInt = 1
    kv_connector_config: KvCacheConnectorConfig | None = None
    max_stats_len: int = Field(default=1000, ge=-1)
    backend: Literal["pytorch"] = "pytorch"

    _parallel_config: ParallelConfig = PrivateAttr()

    @property
    def parallel_config(self) -> ParallelConfig:
        """Return how many processes there are."""
        return self._parallel_config

    @field_validator("gpus_per_node", mode="before")
    @classmethod
    def _count_gpus(cls, value: int | None) -> int | None:
        return control.gpus if value is None else value

    @field_validator("env_overrides", mode="before")
    @classmethod
    def _spell_overrides(cls, value: dict[Any, Any] | None) -> dict[str, str] | None:
        return None if value is None else {str(key): str(each) for key, each in value.items()}

    @validator(mode="after")
    def _normalise(self) -> Self:
        for name in NORMALISED:
            if getattr(self, name) is None:
                setattr(self, name, type(self).model_fields[name].default)
        for name in ("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"):
            if getattr(self, name) is None:
                setattr(self, name, -1)
        self._parallel_config = self._parallel()
        return self

    @validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_batch_size and self.max_num_tokens and self.max_batch_size > self.max_num_tokens:
            logger.warning(
                f"max_batch_size [{self.max_batch_size}] should be less than or equal to max_num_tokens "
                f"[{self.max_num_tokens}]"
            )
        return self

    def _parallel(self) -> ParallelConfig:
        return ParallelConfig(
            self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size, self.gpus_per_node or 0
        )


LlmArgs = TorchLlmArgs
