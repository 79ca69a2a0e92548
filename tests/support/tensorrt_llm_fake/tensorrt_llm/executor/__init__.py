"""The executor's public names. Source: `tensorrt_llm/executor/__init__.py` @ 5573a380 (what its star imports show)."""

from .executor import CppExecutorError, GenerationExecutor
from .request import LoRARequest, PromptAdapterRequest
from .result import CompletionOutput, GenerationResult, IterationResult
from .utils import RequestError

__all__ = [
    "CompletionOutput",
    "CppExecutorError",
    "GenerationExecutor",
    "GenerationResult",
    "IterationResult",
    "LoRARequest",
    "PromptAdapterRequest",
    "RequestError",
]
