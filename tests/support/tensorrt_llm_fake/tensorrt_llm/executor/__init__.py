"""The executor's public names. Source: `tensorrt_llm/executor/__init__.py` @ 5573a380 (what its star imports show)."""

from .executor import GenerationExecutor
from .request import LoRARequest
from .result import CompletionOutput, GenerationResult
from .utils import RequestError

__all__ = [
    "CompletionOutput",
    "GenerationExecutor",
    "GenerationResult",
    "LoRARequest",
    "RequestError",
]
