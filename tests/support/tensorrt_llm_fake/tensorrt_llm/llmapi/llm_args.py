"""The engine's arguments: names, types, defaults, and what is refused together.

| value | exception |
|---|---|
| an unknown field of a nested configuration, a wrong type, a value out of range | `pydantic.ValidationError` |
| an unknown keyword of `LLM` | `ValueError`, by `LLM` itself, before this module sees it |

Nested configurations keep their identity: pydantic takes an instance as it is, and nothing here copies one. `Opaque`
fields take anything: the agent passes them on, and the fake does nothing with them.
Source: `tensorrt_llm/llmapi/llm_args.py` @ 00043967, classes BaseLlmArgs and TorchLlmArgs (`SURFACE.md`).
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, PrivateAttr, field_validator
from pydantic import model_validator as validator

from .._fake.control import control
from ..logger import logger
from ._kv_args import CacheTransceiverConfig, KvCacheConfig, KVEventsConfig, MambaStateConfig, StrictBaseModel

__all__ = [
    "AttentionDpConfig",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DecodingBaseConfig",
    "DynamicBatchConfig",
    "Eagle3DecodingConfig",
    "KVEventsConfig",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "LlmArgs",
    "LoadFormat",
    "MTPDecodingConfig",
    "MambaStateConfig",
    "MoeConfig",
    "PeftCacheConfig",
    "SchedulerConfig",
    "StrictBaseModel",
    "TorchCompileConfig",
    "TorchLlmArgs",
    "WaitingQueuePolicy",
]

Opaque = Any
NORMALISED = ("max_batch_size", "max_input_len", "max_beam_width", "max_num_tokens")


class CapacitySchedulerPolicy(StrEnum):
    """Which requests run when blocks are short."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(StrEnum):
    """How long prompts are cut."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"
    FORCE_CHUNK = "FORCE_CHUNK"


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


class DynamicBatchConfig(StrictBaseModel):
    """Batch sizes that follow the load."""

    enable_batch_size_tuning: bool = True
    enable_max_num_tokens_tuning: bool = False
    dynamic_batch_moving_average_window: int = 128


class SchedulerConfig(StrictBaseModel):
    """The scheduler."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None
    waiting_queue_policy: WaitingQueuePolicy = WaitingQueuePolicy.FCFS
    use_python_scheduler: bool = False
    enable_prefix_aware_scheduling: bool = True


class PeftCacheConfig(StrictBaseModel):
    """The cache of LoRA weights."""

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1024**3
    lora_prefetch_dir: str | None = None


class CudaGraphConfig(StrictBaseModel):
    """CUDA graphs of decode batches. Which sizes are made where none is given is not modelled."""

    batch_sizes: list[int] | None = None
    max_batch_size: NonNegativeInt = 0
    enable_padding: bool = False
    mode: Literal["decode"] = "decode"


class AttentionDpConfig(StrictBaseModel):
    """Balance between attention-DP ranks. The telemetry page names two more; their defaults are unknown: opaque."""

    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10
    enable_kv_cache_aware_routing: Opaque = None
    kv_cache_routing_conversation_affinity: Opaque = None


class MoeConfig(StrictBaseModel):
    """Mixture of experts."""

    backend: Literal[
        "AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
        "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL",
    ] = "AUTO"  # fmt: skip
    max_num_tokens: int | None = None
    load_balancer: Opaque = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class DecodingBaseConfig(StrictBaseModel):
    """What all kinds of speculative decoding have."""

    max_draft_len: NonNegativeInt | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | Path | None = None
    max_concurrency: PositiveInt | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_rate_window_size: NonNegativeInt | None = None
    acceptance_rate_threshold: float | None = None
    use_rejection_sampling: bool = False
    allow_advanced_sampling: bool = False
    advanced_sampling_mode: Opaque = None
    enable_penalty: bool = False


class Eagle3DecodingConfig(DecodingBaseConfig):
    """Eagle3, with its draft as a part of the model: `eagle3_one_model` of older candidates is gone."""

    decoding_type: Literal["Eagle3"] = "Eagle3"
    eagle_choices: list[list[int]] | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815  the engine's name
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"
    sa_config: Opaque = None


class MTPDecodingConfig(DecodingBaseConfig):
    """Multi-token prediction by layers of the model."""

    decoding_type: Literal["MTP"] = "MTP"
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: PositiveInt = 1
    relaxed_delta: NonNegativeFloat = 0.0
    use_mtp_vanilla: bool = False
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815  the engine's name
    sa_config: Opaque = None
    num_nextn_predict_layers: int | None = None
    begin_thinking_phase_token: NonNegativeInt = 128798
    end_thinking_phase_token: NonNegativeInt = 128799


class TorchCompileConfig(StrictBaseModel):
    """torch.compile."""

    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[PositiveInt] | None = None
    enable_userbuffers: bool = True
    max_num_streams: PositiveInt = 3


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
    custom_tokenizer: str | None = None
    post_processor_hook: str | None = None
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
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: Opaque = None
    load_format: str | LoadFormat = LoadFormat.AUTO
    enable_lora: bool = False
    lora_config: Opaque = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Opaque = None
    iter_stats_max_iterations: Annotated[int, Field(ge=-1)] | None = None
    request_stats_max_iterations: Annotated[int, Field(ge=-1)] | None = None
    peft_cache_config: PeftCacheConfig | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    sparse_attention_config: Opaque = None
    speculative_config: Opaque = None
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    decoding_config: Opaque = None
    mpi_session: Opaque = Field(default=None, exclude=True, alias="_mpi_session")
    otlp_traces_endpoint: str | None = None
    return_perf_metrics: bool = False
    perf_metrics_max_requests: NonNegativeInt = 0
    prometheus_metrics_config: Opaque = None
    enable_energy_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    env_overrides: dict[str, str] | None = None
    telemetry_config: Opaque = None
    garbage_collection_gen0_threshold: int = 20_000
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    multimodal_config: Opaque = None
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    nvfp4_gemm_config: Opaque = None
    dwdp_config: Opaque = None
    encoder_max_batch_size: PositiveInt | None = None
    encoder_max_num_tokens: PositiveInt | None = None
    attn_backend: str = "TRTLLM"
    sampler_force_async_worker: bool = False
    enable_speculative_beam_history_d2h: bool = False
    enable_early_first_token_response: bool = False
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    batch_wait_timeout_ms: NonNegativeFloat = 0
    batch_wait_timeout_iters: NonNegativeInt = 0
    batch_wait_max_tokens_ratio: float = Field(default=0, ge=0, le=1)
    torch_compile_config: TorchCompileConfig | None = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    enable_min_latency: bool = False
    stream_interval: PositiveInt = 1
    force_dynamic_quantization: bool = False
    allreduce_strategy: (
        Literal[
            "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC",
        ] | None
    ) = "AUTO"  # fmt: skip
    checkpoint_loader: Opaque = None
    checkpoint_format: str | None = None
    mx_config: Opaque = None
    gms_config: Opaque = None
    kv_connector_config: KvCacheConnectorConfig | None = None
    mm_encoder_only: bool = False
    encode_only: bool = False
    ray_worker_extension_cls: str | None = None
    ray_placement_config: Opaque = Field(default=None, exclude=True)
    ray_worker_nsight_options: dict[str, str] | None = None
    sleep_config: Opaque = None
    reorder_policy_config: Opaque = None
    enable_resource_governor: bool = False
    use_cute_dsl_blockscaling_mm: bool = False
    use_cute_dsl_blockscaling_bmm: bool = False
    use_cute_dsl_bf16_bmm: bool = False
    use_cute_dsl_bf16_gemm: bool = False
    max_stats_len: int = Field(default=1000, ge=-1)
    layer_wise_benchmarks_config: Opaque = None
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
        if self.encode_only and self.mm_encoder_only:
            raise ValueError("encode_only and mm_encoder_only are mutually exclusive.")
        if self.skip_tokenizer_init and self.post_processor_hook is not None:
            raise ValueError("post_processor_hook is not supported together with skip_tokenizer_init")
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
