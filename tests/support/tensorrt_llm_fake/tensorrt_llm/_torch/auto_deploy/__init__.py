"""The AutoDeploy backend."""

from .llm import LLM
from .llm_args import LlmArgs

__all__ = ["LLM", "LlmArgs"]
