"""Settings of a TensorRT-LLM engine beyond its own arguments.

Its arguments come from separate flags and files (`worker_agent/engine_args/sources.py`), in the engine's own format.
"""

from typing import Annotated, Literal

from pydantic import Field

from kv_runtime.config.sections import Section
from kv_runtime.text.model import Text

_NAME = Annotated[str, Field(min_length=1, max_length=256)]
_TEXT = Annotated[str, Field(min_length=1)]


class TrtllmSection(Section):
    """What the engine loads beside the model, who places conversations, and how long the agent waits when it stops."""

    loras: dict[_NAME, _TEXT] = Field(
        {},
        max_length=1024,
        description="LoRA adapters: the key is the name that requests use, the value is the directory of the weights",
    )
    logits_processors: dict[_NAME, _TEXT] = Field(
        {},
        max_length=64,
        description="the key is the name that requests use, the value is package.module:factory; the agent imports it",
    )
    conversation_affinity: bool = Field(
        default=False, description="the engine chooses the rank of a request that names its conversation"
    )
    transfer_s: float = Field(
        30.0, ge=0, le=3600, description="how long a prefill worker's stop waits for blocks to be fetched"
    )
    shutdown_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="how long the agent waits for the engine to end; after that the agent goes on without it",
    )

    def settings(self, text: Text, log_level: Literal["debug", "info", "warning", "error"]) -> "TrtllmSettings":
        """Return the engine's settings."""
        end_ids, vocab_size = tuple(sorted(text.eos_ids)), text.vocab_size
        return TrtllmSettings(**self.model_dump(), end_ids=end_ids, log_level=log_level, vocab_size=vocab_size)


class TrtllmSettings(TrtllmSection):
    """The section, and facts that the engine does not know or report.

    `end_ids` are the model's end tokens; they do not end an answer if its request has `ignore_eos`. `vocab_size` is the
    model's, in tokens: without it no request may have a `logit_bias`. `watch_s` is the time between two health checks,
    which cost the engine nothing while it lives.
    """

    end_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    watch_s: float = 0.5
