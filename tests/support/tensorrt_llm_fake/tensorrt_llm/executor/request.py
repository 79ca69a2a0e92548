"""What belongs to a request. Source: `tensorrt_llm/executor/request.py` (`SURFACE.md`)."""

import os
from dataclasses import dataclass

DEFAULT_REQUEST_PRIORITY: float = 0.5


@dataclass(slots=True)
class LoRARequest:
    """A LoRA adapter; its path must exist."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if not os.path.exists(self.lora_path):  # noqa: PTH110  as the real one
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
        if self.lora_ckpt_source not in {"hf", "nemo"}:
            raise ValueError(f"lora_ckpt_source must be 'hf' or 'nemo', got '{self.lora_ckpt_source}'")
