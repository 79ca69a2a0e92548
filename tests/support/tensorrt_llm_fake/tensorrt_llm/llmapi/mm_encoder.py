"""`MultimodalEncoder`: an engine that encodes media and generates nothing.

A result's `disaggregated_params` has a handle and eight hash ints for each item; a context worker's request takes them.
Source: `tensorrt_llm/llmapi/mm_encoder.py` @ 83ab45a5 and stored text 67132866139 (`SURFACE.md`).
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from pathlib import Path
from typing import Any, Literal

from ..inputs import PromptInputs
from ..sampling_params import SamplingParams
from .llm import BaseLLM, RequestOutput

MAX_NUM_TOKENS = 16_384


class MultimodalEncoder(BaseLLM):
    """The encoder of a multimodal model."""

    _encoder_only = True

    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Literal["auto", "float16", "float32", "bfloat16"] = "auto",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("max_num_tokens") is None:
            kwargs["max_num_tokens"] = MAX_NUM_TOKENS
        super().__init__(
            model, trust_remote_code=trust_remote_code, tensor_parallel_size=tensor_parallel_size, dtype=dtype, **kwargs
        )

    def generate_async(  # type: ignore[override]  # as the real one
        self, inputs: PromptInputs, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Return the result of a prompt's media at once."""
        return super().generate_async(inputs, sampling_params)
