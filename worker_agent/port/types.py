"""An engine's requests, outputs, description and errors."""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from kv_protocol.image_headers import Pixels
from kv_protocol.openai.errors import as_json
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Sampling, TokenLogprobs

MediaKind = Literal["image", "embeddings"]
Skill = Literal["guides", "structural_tags", "logits_processors", "prompt_logprobs"]
ALL_SKILLS: frozenset[Skill] = frozenset(get_args(Skill))
FinishReason = Literal["length", "stop", "error"]


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a file: its bytes are `data[begin:end]`, counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """Media of a prompt, checked: the bytes of an image, with its `pixels`, or of embeddings, as a `tensor`.

    `digest` is the BLAKE3 of `data`, the same for equal media from any source.
    """

    field: str
    kind: MediaKind
    media_type: str
    data: bytes
    digest: str
    pixels: Pixels | None = None
    tensor: Tensor | None = None

    def __repr__(self) -> str:
        return f"Media({self.field}, {self.media_type}, {len(self.data)} bytes, {self.digest})"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's sizes: in tokens, blocks of `block_size` tokens per rank, or requests per rank.

    `max_prompt_tokens` bounds the prompts that the engine computes, if it is less than `max_seq_len` - 1; else 0.
    `kv_cache_dtype` is the data type of its KV cache, in lower case; empty: unknown.
    """

    model: str
    version: str
    event_source: str
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_seq_len: int
    max_prompt_tokens: int = 0
    dp_ranks: tuple[int, ...] = (0,)
    kv_cache_dtype: str = ""
    skills: frozenset[Skill] = frozenset()
    """The optional features that it has."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `prompt` is not empty; prompt and `max_tokens` together fit in `max_seq_len`.

    Without `dp_rank` the engine chooses the rank. An empty LoRA name or salt is an absent one.

    Engines ignore fields after `cache_salt` that they do not support. `queue_priority`, 0..1: of the waiting requests,
    the highest goes first. `handoff` comes from the worker of the phase before; `transfer_id`, unique in the fleet,
    names the transfer that a prefill worker begins. With `is_context_and_generation` a decode worker computes the
    prompt too, without a handoff. `logits_processors` are names of the engine's configuration.

    `media` are the prompt's, in order; the prompt has one token for each, which the engine expands. `text` is that
    prompt before tokenization: an engine whose processor places media reads it instead of the tokens. If an encode
    worker has encoded the media, they are in `handoff`, and `media` is empty.

    `logit_bias` are pairs of a token and the bias of its logit; `bad_token_ids` are never generated.
    `trace_headers` name the trace (W3C) that the engine's spans belong to. `conversation_id` names the conversation: an
    engine may keep its requests on one rank.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    sampling: Sampling = Sampling()
    queue_priority: float | None = None
    handoff: Handoff | None = None
    transfer_id: int | None = None
    is_context_and_generation: bool = False
    logits_processors: tuple[str, ...] = ()
    media: tuple[Media, ...] = ()
    text: str | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    trace_headers: Mapping[str, str] = {}
    conversation_id: str | None = None


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a generation. `cached_tokens` is how many of the prompt's tokens were reused.

    `choice` counts from 0; each has its own finish reason. The token that stopped it is among its tokens. `logprobs`,
    if requested, has one entry for each new token, None if unknown; only the first output has `prompt_logprobs`.
    `handoff` is for the next worker.

    `prompt`, on the first output of each choice, is the prompt as the engine computed it, if that differs from the
    request's: media are expanded to all their tokens. The request to the next worker has this prompt.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    handoff: Handoff | None = None
    prompt: tuple[int, ...] = ()


class EngineError(Exception):
    """The engine failed an operation."""


class RequestRefused(EngineError):
    """The request is invalid: the message names the field, what was found and what is allowed."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {as_json(found)}, allowed {allowed}")
        self.field = field


class EngineStopped(EngineError):
    """The engine stopped before the generation ended."""


class EncoderUnavailable(EngineStopped):
    """The encode worker that the engine needs is unavailable; `retry_s` is its retry time, if it sent one."""

    def __init__(self, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_s = retry_s
