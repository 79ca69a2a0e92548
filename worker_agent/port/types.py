"""The interface of an engine: its requests, outputs, description and errors, and the rules of requests to any engine.

TensorRT-LLM sets the shapes; the simulated engine follows them. A `Rule` is a tuple: the name of the request's field,
the value that was found there, the text of what is allowed, and whether the request meets the rule.

    role                                  handoff                         choices    the prompt is computed
    aggregated                            an encoder's, or none           any        here
    prefill                               an encoder's, or none           1          here, and one token after it
    decode                                a prefill worker's, required    any        by that worker: its KV is fetched
    decode, `is_context_and_generation`   an encoder's, or none           any        here
    encode                                generates nothing: refused

Source: `docs/SOURCES.md` D4.2; NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py`.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, Protocol

import msgspec

from kv_protocol.fleet import Role
from kv_protocol.image_headers import Pixels
from kv_protocol.openai.errors import as_json
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Sampling, TokenLogprobs

FinishReason = Literal["length", "stop", "error"]
Rule = tuple[str, object, str, bool]
POLL_S = 0.05
"""The longest time that one poll waits until the engine has something. A stop waits for the poll to return."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """The one tensor of a `.safetensors` file: all bytes of the file from `begin` on belong to it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """Media of a prompt, checked: the bytes of an image, with its `pixels`, or of embeddings, as a `tensor`.

    `digest` is the BLAKE3 of `data`, the same for equal media from any source.
    """

    field: str
    media_type: str
    data: bytes
    digest: str
    pixels: Pixels | None = None
    tensor: Tensor | None = None

    def __repr__(self) -> str:
        return f"Media({self.field}, {self.media_type}, {len(self.data)} bytes, {self.digest})"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the version and the sizes of an engine.

    A KV block has `block_size` tokens. `total_kv_blocks` and `max_num_seqs` are the KV blocks and the running requests
    of one rank. `max_num_batched_tokens` is the tokens of one iteration of a rank. `max_seq_len` is the tokens of a
    prompt and its answer together.
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
    takes_structural_tags: bool = False
    """Whether a structural tag can guide an answer; it then forces the tool calls that a request demands."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `prompt` is not empty; prompt and `max_tokens` together fit in `max_seq_len`.

    Without `dp_rank` the engine chooses the rank. An empty LoRA name or salt is an absent one.

    The fields after `cache_salt` are ignored or refused by an engine that lacks them. `queue_priority` is 0..1: of the
    waiting requests, the one with the highest goes first. `handoff` comes from the worker of the phase before;
    `transfer_id`, unique in the fleet, names the transfer that a prefill worker begins. With
    `is_context_and_generation` a decode worker computes the prompt too, without a handoff. `logits_processors` are
    names of the engine's configuration.

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

    `choice` is the number of the choice, from 0; each choice has its own finish reason. If a stop token ended the
    choice, that token is among `token_ids`. `logprobs`, if requested, has one entry for each new token, None if
    unknown; only the first output of each choice has `prompt_logprobs`. `handoff` is for the next worker.

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


class KvFetches:
    """Counts an engine's fetches of KV since its start.

    `by_outcome` has the number of fetches with each outcome. `fetched_bytes` and `seconds` are the bytes and the engine
    seconds of the complete fetches, as the engine measured them.
    """

    def __init__(self, *outcomes: str) -> None:
        self.by_outcome = dict.fromkeys(outcomes, 0)
        self.fetched_bytes = 0
        self.seconds = 0.0


class EngineError(Exception):
    """The engine failed an operation."""


class RequestRefused(EngineError):
    """The request is invalid: the message names the field, what was found and what is allowed."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {as_json(found)}, allowed {allowed}")
        self.field = field


class EngineStopped(EngineError):
    """The engine takes no requests, or it ended a generation early."""


class EncoderUnavailable(EngineStopped):
    """The encode worker that the engine needs is unavailable; `retry_s` is its retry time, if it sent one."""

    def __init__(self, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Engine(Protocol):
    """An engine, between `start` and `stop`.

    `kv_events` and `iteration_stats` block their calling thread until there is something or the time is up, and then
    drain everything. Any thread may call them, each from one thread at a time. All other methods run on the event loop.
    """

    def describe(self) -> EngineDescription:
        """Return the engine's description, which is constant after `start`.

        Raises:
            EngineError: `start` has not returned, and this engine has no description before.
        """

    async def start(self) -> None:
        """Return when the engine accepts requests."""

    async def run(self) -> None:
        """Drive the engine until `stop`; its owner runs this method after `start`, in a separate task.

        Returning before `stop` is a failure of the engine. Cancelling this method ends generations like a `stop`
        without grace.
        """

    async def stop(self, grace_s: float) -> None:
        """End the engine and return when it has ended.

        A generation that still runs after `grace_s` raises `EngineStopped`.
        """

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield outputs as they come; closing the generator aborts the generation and frees its blocks.

        Raises:
            RequestRefused: the request itself cannot be served.
            EngineStopped: the engine ended first.
        """

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all KV events since the last call, in TensorRT-LLM's JSON shape; wait at most `timeout_s` for one.

        Raises:
            EngineError: the engine cannot be polled now.
        """

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the statistics of all iterations since the last call, in TensorRT-LLM's JSON shape.

        The call waits at most `timeout_s` for an iteration.

        Raises:
            EngineError: the engine cannot be polled now.
        """


# ---------------------------------------------------------------- rules
def computed_tokens_max(request: EngineRequest) -> int:
    """Return the most tokens that a generation computes: all but the last."""
    return len(request.prompt) + request.max_tokens - 1


def limits(request: EngineRequest, engine: EngineDescription, *, id_in_use: bool) -> Iterator[Rule]:
    """Yield the rules that a request must meet even if it is the engine's only one.

    If `total_kv_blocks` is 0, the size of the pool of KV blocks is unknown.
    """
    isl, osl, dp_rank = len(request.prompt), request.max_tokens, request.dp_rank
    yield "request_id", request.request_id, "an id that is not in use", not id_in_use
    yield "dp_rank", dp_rank, f"one of {engine.dp_ranks}", dp_rank is None or dp_rank in engine.dp_ranks
    yield "prompt", f"{isl} tokens", "1 token or more", isl > 0
    yield "max_tokens", osl, "1 or more", osl > 0
    total = f"{isl} prompt tokens + max_tokens {osl}"
    yield "max_tokens", total, f"at most {engine.max_seq_len} together", isl + osl <= engine.max_seq_len
    blocks, pool = -(-computed_tokens_max(request) // engine.block_size), engine.total_kv_blocks
    allowed = f"at most the pool's {pool} blocks"
    yield "max_tokens", f"{total} = {blocks} blocks", allowed, not pool or blocks <= pool


def refuse_unmet(*tables: Iterable[Rule]) -> None:
    """Raise `RequestRefused` for the first rule that is not met."""
    for field, found, allowed, is_met in chain.from_iterable(tables):
        if not is_met:
            raise RequestRefused(field, found, allowed)


def plain_rules(request: EngineRequest) -> Iterator[Rule]:
    """Yield the rules of an engine without guides, logits processors and log probabilities of the prompt."""
    guide, logprobs = request.sampling.guide, request.sampling.prompt_logprobs
    allowed = "none on this worker"
    yield guide.field if guide else "", guide and guide.kind, allowed, guide is None
    yield "logits_processors", request.logits_processors, allowed, not request.logits_processors
    yield "prompt_logprobs", logprobs, allowed, logprobs is None


def takes_transfer(request: EngineRequest, role: Role) -> bool:
    """Return whether the engine fetches the prompt's KV from another worker before the first token."""
    return role == "decode" and not request.is_context_and_generation


def role_rules(request: EngineRequest, role: Role) -> Iterator[Rule]:
    """Yield the rules for a request to a worker of `role`, by the table at the top of this module."""
    handoff, n = request.handoff, request.sampling.choices
    has_media = handoff is not None and handoff.multimodal_embedding_handles is not None
    found, encoders = "none" if handoff is None else "one", "none, or an encoder's multimodal_embedding_handles"
    if role == "encode":
        yield "role", role, "aggregated, prefill or decode: an encoder generates nothing", False
    elif role == "prefill":
        yield "disaggregated_params", found, encoders, handoff is None or has_media
        yield "n", n, "1 on a prefill worker: one answer is handed over", n == 1
    elif takes_transfer(request, role):
        allowed = "those of a prefill worker: decode mode requires them"
        yield "disaggregated_params", found, allowed, handoff is not None
        state, tokens = handoff and handoff.opaque_state, handoff and handoff.first_gen_tokens
        yield "disaggregated_params.first_gen_tokens", tokens, "one token or more", bool(tokens)
        yield "disaggregated_params.encoded_opaque_state", state, "what the prefill worker said, in base64", bool(state)
    else:
        allowed = f"{encoders}: this worker computes the prompt"
        yield "disaggregated_params", found, allowed, handoff is None or has_media
