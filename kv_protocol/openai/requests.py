"""The requests of the OpenAI HTTP interface, as far as agents and router read them.

ChatRequest, CompletionRequest   for agents with an engine in their process: all options, with types. Unknown keys are
refused by name, so that a misspelt option is never ignored silently
Inbound (`inbound.py`)           for the router: what routing needs. All else is for the worker

Options that are valid alone and invalid together:

min_tokens                  at most the limit of the response's tokens
top_logprobs                with `logprobs: true`
tool_choice "required"      with `tools`
tool_choice of a function   one of `tools`
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kv_protocol.continuation import Continuation
from kv_protocol.errors import UNDECODABLE, shortened
from kv_protocol.openai.decoding import check_utf8, decode_inbound
from kv_protocol.openai.errors import RequestInvalid, explained
from kv_protocol.openai.inbound import CHAT, COMPLETIONS, ChatInbound, CompletionInbound, Inbound
from kv_protocol.openai.option_table import (
    Count,
    Effort,
    JsonObject,
    Logprobs,
    Modalities,
    NamedToolChoice,
    NvExt,
    Options,
    StreamOptions,
    Tool,
    ToolChoice,
    Verbosity,
    template_options,
)
from kv_protocol.openai.parts import ABSENT, OptionalPart, is_given, read_ids, read_prompts

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "ChatInbound",
    "ChatRequest",
    "CompletionInbound",
    "CompletionRequest",
    "Inbound",
    "NvExt",
    "Request",
    "RequestInvalid",
    "StreamOptions",
    "decode_chat",
    "decode_completion",
    "decode_inbound",
    "is_given",
]


_NAMES_CHARACTERS_MAX = 200
_tools = OptionalPart[list[Tool]](list[Tool])


class KnownNvExt(NvExt, frozen=True, forbid_unknown_fields=True):
    """The extension, without unknown keys."""


class _Request(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    nvext: KnownNvExt | None = None
    kv_prompt_ids: str | None = None
    """The prompt as base64 of little-endian u32 token ids; set by the router for agents that accept it."""
    disaggregated_params: msgspec.Raw = ABSENT
    """The handoff of the previous phase's worker; set by the router."""
    kv_continue: Continuation | None = None
    """The progress of this response on another worker; set by the router."""

    @property
    def salt(self) -> str:
        """The cache salt, which isolates its cached blocks; empty: none."""
        return self.cache_salt or (self.nvext and self.nvext.cache_salt) or ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`. Messages are checked where they are rendered."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    modalities: Modalities | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    thinking: JsonObject | bool | None = None
    prediction: JsonObject | None = None
    prompt_cache_key: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    """The prompt as a prefill worker computed it, with media; set by the router for the decode worker."""

    def computed_ids(self) -> bytes | None:
        """Return `prompt_token_ids` as little-endian u32s; None: there are none; raise `RequestInvalid`."""
        given = self.prompt_token_ids
        return read_ids(given, "prompt_token_ids") if is_given(given) else None

    @property
    def template_options(self) -> dict[str, Any]:
        """The options for rendering the chat."""
        return template_options(
            tools=self.tools,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate, by either of its names."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt` is a text, its token ids, or a list of either (`prompts.py`)."""

    prompt: msgspec.Raw
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Logprobs | None = None

    def read_prompts(self) -> list[str | bytes]:
        """Return the texts, or their ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
        return read_prompts(self.prompt)

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate."""
        return self.max_tokens


Request = ChatRequest | CompletionRequest


def check_chat(chat: ChatRequest) -> None:
    """Check that the options are compatible, and that tools are functions with names; raise `RequestInvalid`."""
    names = [tool.function.name for tool in _tools.read(msgspec.Raw(msgspec.json.encode(chat.tools)), "tools") or ()]
    check_min_tokens(chat)
    if chat.top_logprobs and not chat.logprobs:
        raise RequestInvalid("top_logprobs", chat.top_logprobs, "none without logprobs: true")
    if chat.tool_choice not in (None, "none", "auto"):
        _check_choice(chat.tool_choice, names)


def check_min_tokens(request: Request) -> None:
    """Check that `min_tokens` is within the limit of the response's tokens; raise `RequestInvalid` otherwise."""
    limit = request.limit_tokens
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise RequestInvalid("min_tokens", request.min_tokens, f"0..{limit}: the limit of the answer's tokens")


def _check_choice(choice: ToolChoice | None, names: Sequence[str]) -> None:
    if choice == "required" and not names:
        raise RequestInvalid("tool_choice", choice, '"none" or "auto": there are no tools')
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        known = shortened(", ".join(names) or "there are none", _NAMES_CHARACTERS_MAX)
        raise RequestInvalid("tool_choice.function.name", choice.function.name, f"the name of one of tools ({known})")


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_chat(body: bytes | bytearray) -> ChatRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    if not body.isascii():
        check_utf8(body)
    try:
        chat = _chat_decoder.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, ChatRequest) from error
    check_chat(chat)
    return chat


def decode_completion(body: bytes | bytearray) -> CompletionRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    if not body.isascii():
        check_utf8(body)
    try:
        completion = _completion_decoder.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, CompletionRequest) from error
    if completion.min_tokens is not None:
        check_min_tokens(completion)
    return completion
