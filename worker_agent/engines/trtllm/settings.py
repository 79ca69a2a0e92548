"""Settings of a TensorRT-LLM engine beyond its own arguments, and the section that configures them.

Its arguments come from separate flags and files (`worker_agent/engine_args/sources.py`), in the engine's own format.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from kv_runtime.config.sections import Section
from kv_runtime.text.model import Text


class LoraAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that requests may name: its number, unique in the engine and from 1, and its weights' path."""

    number: int
    path: str


class TrtllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the engine does not know or report. Times in seconds.

    `end_ids` are the model's end tokens: with `ignore_eos` they do not stop. `watch_s` is the time between two health
    checks, which cost the engine nothing while it lives; one that takes longer than `answer_s`, or than any iteration,
    says that it is dead. `transfer_s` is how long a prefill worker waits for its transfers, `shutdown_s` how long the
    engine may take to end. `vocab_size` is the model's, in tokens: without it no request may have a `logit_bias`. With
    `conversation_affinity` the engine chooses the rank of a request that names its conversation.
    """

    end_ids: tuple[int, ...] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    loras: Mapping[str, LoraAdapter] = {}
    logits_processors: Mapping[str, str] = {}
    watch_s: float = 0.5
    answer_s: float = 30.0
    transfer_s: float = 30.0
    shutdown_s: float = 30.0
    vocab_size: int | None = None
    conversation_affinity: bool = False


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
