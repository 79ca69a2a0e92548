"""The requests of the OpenAI HTTP interface, as far as agents and router read them.

    ChatRequest,             for agents with an engine in their process: all options, with types. Unknown keys are
      CompletionRequest      refused by name, so that a misspelt option is never ignored silently
    Inbound (`inbound.py`)   for the router: what routing needs. All else is for the worker

Conditions on options that are each valid by themselves:

    min_tokens                  at most the limit of the response's tokens
    top_logprobs                with `logprobs: true`
    tool_choice "required"      with `tools`
    tool_choice of a function   one of `tools`
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from kv_protocol.continuation import Continuation
from kv_protocol.errors import UNDECODABLE, shortened
from kv_protocol.openai.errors import RequestInvalid, Verbatim, explained
from kv_protocol.openai.inbound import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ChatInbound,
    CompletionInbound,
    EmbeddingsInbound,
    Inbound,
    PassedInbound,
)
from kv_protocol.openai.option_table import (
    KEPT,
    LEFT_OUT,
    NO_EFFECT,
    Count,
    JsonObject,
    Logprobs,
    NamedToolChoice,
    NvExt,
    Options,
    Tool,
    ToolChoice,
    Unsupported,
    marks_of,
    template_options,
)
from kv_protocol.openai.parts import ABSENT, OptionalPart, is_given, read_ids, read_prompts
from kv_protocol.openai.responses import RESPONSES, ResponsesInbound

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "ChatInbound",
    "CompletionInbound",
    "Inbound",
    "RequestInvalid",
    "is_given",
]


_NAMES_CHARACTERS_MAX = 200
_tools = OptionalPart[list[Tool]](list[Tool])


class KnownNvExt(NvExt, frozen=True, forbid_unknown_fields=True):
    """The extension, without unknown keys."""


class _Request(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, KEPT]
    nvext: Annotated[KnownNvExt | None, LEFT_OUT] = None
    kv_prompt_ids: bytes | None = None
    """The prompt's token ids as little-endian u32s, in base64; set by the router for agents that accept it."""
    disaggregated_params: msgspec.Raw = ABSENT
    """The handoff of the previous phase's worker; set by the router."""
    kv_continue: Continuation | None = None
    """The progress of this response on another worker; set by the router."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`. Messages are checked where they are rendered."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1), LEFT_OUT]
    max_completion_tokens: Annotated[Count | None, LEFT_OUT] = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[ToolChoice | None, LEFT_OUT] = None
    parallel_tool_calls: Annotated[bool | None, LEFT_OUT] = None
    reasoning_effort: Annotated[Annotated[str, msgspec.Meta(max_length=64)] | None, LEFT_OUT] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, NO_EFFECT] = None
    modalities: Annotated[list[Literal["text", "audio"]] | None, Unsupported(neutral=["text"])] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, LEFT_OUT] = None
    documents: Annotated[list[dict[str, Any]] | None, LEFT_OUT] = None
    add_generation_prompt: Annotated[bool | None, LEFT_OUT] = None
    continue_final_message: Annotated[bool | None, LEFT_OUT] = None
    include_reasoning: bool | None = None
    thinking: Annotated[JsonObject | bool | None, Unsupported()] = None
    prediction: Annotated[JsonObject | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT, LEFT_OUT] = None
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
    """`POST /v1/completions`. `prompt` is a text, its token ids, or a list of either (`parts.py`)."""

    prompt: Annotated[msgspec.Raw, LEFT_OUT]
    echo: Annotated[bool | None, Unsupported(neutral=False)] = None
    suffix: Annotated[str | None, Unsupported(neutral="")] = None
    logprobs: Logprobs | None = None

    def read_prompts(self) -> list[str | bytes]:
        """Return each prompt: a text, or ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
        return read_prompts(self.prompt)


Request = ChatRequest | CompletionRequest
MARKS = marks_of(CompletionRequest, ChatRequest)
"""The marks of each option (`option_table.py`)."""


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
_decoders: dict[str, msgspec.json.Decoder[Inbound]] = {
    CHAT: msgspec.json.Decoder(ChatInbound),
    COMPLETIONS: msgspec.json.Decoder(CompletionInbound),
    RESPONSES: msgspec.json.Decoder(ResponsesInbound),
    EMBEDDINGS: msgspec.json.Decoder(EmbeddingsInbound),
}
_Kind = TypeVar("_Kind", bound=Inbound)
_Read = TypeVar("_Read")
_passed = msgspec.json.Decoder(PassedInbound)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHECKED_HERE = ("model", "nvext", "kv_prompt_ids", "kv_continue")
"""The router refuses a value of the wrong type for these keys; for other keys the worker decides."""
_KEY = re.compile(r" - at `\$\.(?P<key>\w+)[^`]*`$")
"""How msgspec's message about a value ends: with the value's place; `key` is the body's key of this place."""


def decode_inbound(path: str, body: bytes | bytearray) -> Inbound:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, if there is none.

    A path that is not an endpoint's (`/v1/route`) takes any kind: a body with `messages` is a chat, one with `input` a
    response, any other a completion. The whole body has to be UTF-8, including values that the router does not read.
    """
    if not body.isascii():
        check_utf8(body)
    decoder = _decoders.get(path) or _decoders[_endpoint_of(body)]
    try:
        return decoder.decode(body)
    except UNDECODABLE:
        return _without_wrong(decoder, body)


def decode_passed(path: str, body: bytes | bytearray) -> PassedInbound:
    """Return the request in `body` to a `path` that is passed on; raise `RequestInvalid` as `decode_inbound` does."""
    check_utf8(body)
    read = _without_wrong(_passed, body)
    return replace(read, model=read.model or "", endpoint=path, path=path)


def _without_wrong(decoder: msgspec.json.Decoder[_Kind], body: bytes | bytearray) -> _Kind:
    """Return the request without its values of the wrong type: the worker refuses them, or takes them."""
    fields, rest = None, body
    while True:
        try:
            return decoder.decode(rest)
        except msgspec.ValidationError as error:
            found = _KEY.search(str(error))
            if found is None or found["key"] in _CHECKED_HERE:
                raise explained(error, body, decoder.type) from error
        except UNDECODABLE as error:
            raise explained(error, body, Inbound) from error
        fields = _decoded(_fields, body, Inbound) if fields is None else fields
        del fields[found["key"]]
        rest = msgspec.json.encode(fields)


def check_utf8(body: bytes | bytearray) -> None:
    """Check that all of the body is UTF-8; raise `RequestInvalid` otherwise."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        found = Verbatim(f"byte 0x{body[error.start]:02x} at {error.start}")
        raise RequestInvalid("body", found, f"UTF-8 ({error.reason})") from error


def _endpoint_of(body: bytes | bytearray) -> str:
    fields = _decoded(_fields, body, Inbound)
    return CHAT if "messages" in fields else RESPONSES if "input" in fields else COMPLETIONS


def decode_chat(body: bytes | bytearray) -> ChatRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    check_utf8(body)
    chat = _decoded(_chat_decoder, body, ChatRequest)
    check_chat(chat)
    return chat


def decode_completion(body: bytes | bytearray) -> CompletionRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    check_utf8(body)
    completion = _decoded(_completion_decoder, body, CompletionRequest)
    check_min_tokens(completion)
    return completion


def _decoded(decoder: msgspec.json.Decoder[_Read], body: bytes | bytearray, kind: type) -> _Read:
    try:
        return decoder.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, kind) from error
