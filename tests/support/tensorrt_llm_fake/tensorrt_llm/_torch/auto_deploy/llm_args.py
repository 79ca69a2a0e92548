"""The arguments of the backend `_autodeploy`: those of `pytorch`, its own, and none of parallelism but `world_size`.

Source: `tensorrt_llm/_torch/auto_deploy/llm_args.py` @ 01e5db06 (without `build_config` and the speculative part).
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator

from ...llmapi.llm_args import ParallelConfig, TorchLlmArgs


class LlmArgs(TorchLlmArgs):
    """The arguments of AutoDeploy."""

    backend: Literal["_autodeploy"] = "_autodeploy"  # type: ignore[assignment]  # as the real one
    model_factory: str = "AutoModelForCausalLM"
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    speculative_model_kwargs: dict[str, Any] = Field(default_factory=dict)
    skip_loading_weights: bool = False
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    world_size: NonNegativeInt = 1
    runtime: Literal["demollm", "trtllm"] = "trtllm"
    device: str = Field(default="cuda", frozen=True)
    draft_checkpoint_loader: Any = None
    mode: Literal["graph", "transformers", "export_edgellm_onnx"] = "graph"
    transforms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    compile_backend: str = "torch-cudagraph"

    @field_validator("max_beam_width")
    @classmethod
    def _refuse_beams(cls, value: int | None) -> int | None:
        if value is not None and value > 1:
            raise ValueError("AutoDeploy does not support beam search (max_beam_width > 1).")
        return value

    @field_validator(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "moe_cluster_parallel_size",
        "moe_tensor_parallel_size",
        "moe_expert_parallel_size",
        "enable_attention_dp",
        "cp_config",
        mode="before",
    )
    @classmethod
    def _refuse_parallelism(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[info.field_name or ""].default:
            raise ValueError("AutoDeploy only supports parallelization via the `world_size` argument.")
        return value

    def _parallel(self) -> ParallelConfig:
        return ParallelConfig(self.world_size, 1, 1, self.gpus_per_node or 0)
