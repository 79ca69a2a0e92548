"""A fake of the public part of TensorRT-LLM that a worker agent uses, for machines without a GPU.

It has the names, signatures, fields, defaults, refusals, event and statistics shapes of the version in `version.py`, as
`SURFACE.md` lists them with their sources, and no line of its code. What the real engine computes on a GPU is
replaced by a formula (`_fake/model.py`); what it caches is cached (`_fake/cache.py`).
"""

from .disaggregated_params import DisaggregatedParams
from .llmapi import LLM, KvCacheConfig, LlmArgs, MultimodalEncoder, TorchLlmArgs
from .logger import logger
from .sampling_params import SamplingParams
from .version import __version__

__all__ = [
    "LLM",
    "DisaggregatedParams",
    "KvCacheConfig",
    "LlmArgs",
    "MultimodalEncoder",
    "SamplingParams",
    "TorchLlmArgs",
    "__version__",
    "logger",
]
