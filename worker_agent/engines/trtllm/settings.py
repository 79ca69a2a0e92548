"""Settings of a TensorRT-LLM engine beyond its own arguments."""

from collections.abc import Mapping
from typing import Literal

import msgspec


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
