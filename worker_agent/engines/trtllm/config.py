"""The configuration section of a TensorRT-LLM engine's settings beyond its own arguments.

Its arguments come from separate flags and files (`worker_agent/engine_args/sources.py`), in the engine's own format.
"""

from typing import Annotated, Literal

from pydantic import Field

from kv_runtime.config.sections import Section
from kv_runtime.text.model import Text
from worker_agent.engines.trtllm.settings import LoraAdapter, TrtllmSettings

_NAME = Annotated[str, Field(min_length=1, max_length=256)]
_TEXT = Annotated[str, Field(min_length=1)]
_SETTINGS = TrtllmSettings()


class TrtllmSection(Section):
    """What is loaded beside the model, and how long the engine's end may take."""

    loras: dict[_NAME, _TEXT] = Field(
        {}, max_length=1024, description="LoRA adapters by the name that requests use: the directories of their weights"
    )
    logits_processors: dict[_NAME, _TEXT] = Field(
        {}, max_length=64, description="by the name that requests use: package.module:factory, which is imported"
    )
    event_hosts: tuple[_TEXT, ...] = Field(
        (), max_length=4096, description="nodes of an engine that streams its KV events; empty: SLURM_STEP_NODELIST"
    )
    conversation_affinity: bool = Field(
        default=_SETTINGS.conversation_affinity,
        description="the engine chooses the rank of a request that names its conversation",
    )
    transfer_s: float = Field(
        _SETTINGS.transfer_s,
        ge=0,
        le=3600,
        description="how long a prefill worker's stop waits for blocks to be fetched",
    )
    shutdown_s: float = Field(
        _SETTINGS.shutdown_s, gt=0, le=3600, description="how long the engine may take to end; then it is left"
    )

    def settings(self, text: Text, log_level: Literal["debug", "info", "warning", "error"]) -> TrtllmSettings:
        """Return the engine's settings; adapters are numbered from 1, in their order here."""
        return TrtllmSettings(
            end_ids=tuple(sorted(text.eos_ids)),
            log_level=log_level,
            loras={name: LoraAdapter(number=at, path=path) for at, (name, path) in enumerate(self.loras.items(), 1)},
            logits_processors=self.logits_processors,
            transfer_s=self.transfer_s,
            shutdown_s=self.shutdown_s,
            vocab_size=text.vocab_size,
            conversation_affinity=self.conversation_affinity,
        )
