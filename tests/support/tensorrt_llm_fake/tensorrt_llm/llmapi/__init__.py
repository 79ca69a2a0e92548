"""The LLM API. Source: `tensorrt_llm/llmapi/__init__.py` @ 5ca85aff and the 1.3.0rc26 API reference."""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from ..disaggregated_params import DisaggregatedParams
from ..executor import CompletionOutput, LoRARequest, RequestError
from ..sampling_params import GuidedDecodingParams, SamplingParams
from .llm import LLM, RequestOutput
from .llm_args import (
    AttentionDpConfig,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    DynamicBatchConfig,
    KvCacheConfig,
    KVEventsConfig,
    LlmArgs,
    MoeConfig,
    SchedulerConfig,
    TorchLlmArgs,
)
from .mm_encoder import MultimodalEncoder

__all__ = [
    "LLM",
    "AttentionDpConfig",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DynamicBatchConfig",
    "GuidedDecodingParams",
    "KVEventsConfig",
    "KvCacheConfig",
    "LlmArgs",
    "LoRARequest",
    "MoeConfig",
    "MultimodalEncoder",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]
