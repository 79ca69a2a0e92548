"""The requests of the OpenAI HTTP interface, as far as router and agents read them: one definition for both.

Unknown keys are refused by name, so that a misspelt option is never silently without effect. Keys that are known and
without effect here stand in `UNUSED_KEYS`; the router names them in `x-ignored-parameters`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded
from kv_protocol.ids import TokenId

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]

UNUSED_KEYS = frozenset({"nvext", "priority", "service_tier", "store", "metadata", "user", "safety_identifier"})


class RequestInvalid(LimitExceeded):
    """A request body that may not be as it is; `field` is its path, as clients write it."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides its text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    nvext: dict[str, Any] | None = None
    kv_prompt_ids: str | None = None
    """The prompt as base64 of little-endian u32 token ids; set by the router for agents that accept it."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`. Messages are checked where they are rendered."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate, by either of its names."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt` is a text or its token ids."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate."""
        return self.max_tokens


Request = ChatRequest | CompletionRequest

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")
_FOUND_CHARACTERS_MAX = 80


def decode_chat(body: bytes) -> ChatRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    try:
        return _chat_decoder.decode(body)
    except UNDECODABLE as error:
        raise _explained(error, body) from error


def decode_completion(body: bytes) -> CompletionRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    try:
        return _completion_decoder.decode(body)
    except UNDECODABLE as error:
        raise _explained(error, body) from error


def ineffective_keys(request: Request) -> tuple[str, ...]:
    """Return the keys that the client set and that have no effect, in the order of their names."""
    return tuple(sorted(key for key in UNUSED_KEYS if getattr(request, key, None) is not None))


def _explained(error: Exception, body: bytes) -> RequestInvalid:
    if not isinstance(error, msgspec.ValidationError):
        return RequestInvalid("body", body[:_FOUND_CHARACTERS_MAX].decode("utf-8", "replace"), f"JSON ({error})")
    text = str(error)
    where = _PATH.search(text)
    path = where["path"] if where else ""
    allowed = _PATH.sub("", text).removeprefix("Expected ")
    if unknown := _UNKNOWN.search(text):
        field = f"{path}.{unknown['field']}" if path else unknown["field"]
        return RequestInvalid(field, unknown["field"], "the parameters of the OpenAI interface and no others")
    if missing := _MISSING.search(text):
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return RequestInvalid(field, None, "a value: it is required")
    return RequestInvalid(path or "body", _found(body, path), allowed)


def _found(body: bytes, path: str) -> Any:  # noqa: ANN401 - whatever the client sent there
    try:
        value: Any = msgspec.json.decode(body)
    except UNDECODABLE:
        return "what cannot be read"
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
    return value if len(repr(value)) <= _FOUND_CHARACTERS_MAX else f"{repr(value)[:_FOUND_CHARACTERS_MAX]}..."
