"""`LLM` with the backend `_autodeploy`. Source: `tensorrt_llm/_torch/auto_deploy/llm.py` @ 01d93fe0."""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from typing import Any

from ...llmapi.llm import BaseLLM


class LLM(BaseLLM):
    """A language model whose graph is transformed on its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["backend"] = "_autodeploy"
        super().__init__(*args, **kwargs)
