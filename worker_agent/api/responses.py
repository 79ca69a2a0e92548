"""`/v1/responses`: a request becomes an equivalent chat; the chat's answer becomes a Response object, or events.

The fields of the request that the answer repeats are in `kv_response`.

    response.created, response.in_progress    before the first item
    ..                                        events of the items
    response.completed                        the answer ended by itself, or with calls
    response.incomplete                       it reached `max_output_tokens`, or the worker's own limit
    response.failed                           the engine failed

    of the answer         item             its events, after `output_item.added` and before `output_item.done`
    -------------------   --------------   -------------------------------------------------------------------------
    ContentDelta          message          content_part.added, output_text.delta .., output_text.done, content_part.done
    ReasoningDelta        reasoning        content_part.added, reasoning_text.delta .., reasoning_text.done,
                                           content_part.done
    ToolCallStarted and   function_call    function_call_arguments.delta .., function_call_arguments.done
    ToolCallArguments

One item is open at a time: another kind of event, or another call, closes it. Each event has the next
`sequence_number`, from 0. There is no `[DONE]`. `reasoning_tokens` of the usage is 0: reasoning tokens are not counted
separately.
Source: the OpenAI API reference, "Create a model response", "Migrate to the Responses API", "The response object" and
"Responses: streaming events".
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.errors import ALLOWED, explained
from kv_protocol.openai.option_table import Count
from kv_protocol.openai.requests import ChatRequest, RequestInvalid, check_chat, check_utf8
from kv_protocol.openai.responses import STATEFUL_KEYS, chat_messages, chat_tools, check_stateless, read_input
from worker_agent.api.choice_text import Piece
from worker_agent.api.parsers.calls import ContentDelta, Event, ToolCallArguments, ToolCallStarted

_NOT_OF_RESPONSES = frozenset(
    {
        "add_generation_prompt", "best_of", "continue_final_message", "disaggregated_params", "documents", "functions",
        "kv_continue", "kv_response", "max_completion_tokens", "max_tokens", "messages", "modalities", "n",
        "prediction", "prompt_logprobs", "prompt_token_ids", "reasoning_effort", "response_format", "verbosity",
    }
)  # fmt: skip
"""Keys of chats that this endpoint does not have, or names differently."""
_NOTHING_INCLUDED = ("reasoning.encrypted_content",)
"""Values of `include` that are accepted and add nothing: the answer contains its reasoning, not encrypted."""


class ResponseChat(ChatRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat of a response; `kv_response` has the fields that the answer repeats."""

    kv_response: dict[str, Any]


class _Own(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that a chat does not have, or has under another name."""

    input: msgspec.Raw
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None


_OWN_KEYS = (*_Own.__struct_fields__, *STATEFUL_KEYS)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_own = msgspec.json.Decoder(_Own)
_chat = msgspec.json.Decoder(ResponseChat)


def decode_response(body: Bytes) -> ResponseChat:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    check_utf8(body)
    try:
        fields, own = _fields.decode(body), _own.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, _Own) from error
    for key in fields:
        if key in _NOT_OF_RESPONSES:
            raise RequestInvalid(key, key, ALLOWED)
    check_stateless(fields)
    _check(own)
    others = {key: value for key, value in fields.items() if key not in _OWN_KEYS}
    chat = msgspec.json.encode(others | _chat_of(own) | {"kv_response": _repeated(own, others)})
    try:
        request = _chat.decode(chat)
    except UNDECODABLE as error:
        raise explained(error, chat, ResponseChat) from error
    check_chat(request)
    return request


def _check(own: _Own) -> None:
    if own.truncation not in (None, "disabled"):
        raise RequestInvalid("truncation", own.truncation, "disabled")
    if own.top_logprobs:
        raise RequestInvalid("top_logprobs", own.top_logprobs, "0: a response tells no log probabilities here")
    for at, name in enumerate(own.include or ()):
        if name not in _NOTHING_INCLUDED:
            raise RequestInvalid(f"include[{at}]", name, ", ".join(_NOTHING_INCLUDED))
    for at, tool in enumerate(own.tools or ()):
        if tool.get("type") != "function":
            raise RequestInvalid(f"tools[{at}].type", tool.get("type"), "function")


def _chat_of(own: _Own) -> dict[str, Any]:
    text = own.text or {}
    chat = {
        "messages": chat_messages(own.instructions, read_input(own.input)),
        "tools": chat_tools(own.tools) if own.tools else None,
        "tool_choice": _tool_choice(own.tool_choice),
        "max_completion_tokens": own.max_output_tokens,
        "reasoning_effort": (own.reasoning or {}).get("effort"),
        "response_format": _response_format(text.get("format")),
        "verbosity": text.get("verbosity"),
    }
    return {key: value for key, value in chat.items() if value is not None}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise RequestInvalid("tool_choice.type", choice.get("type"), "function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text_format: object) -> dict[str, Any] | None:
    """Return the answer's format in a chat's form; None if it is text."""
    if text_format is None:
        return None
    kind = text_format.get("type") if isinstance(text_format, dict) else None
    if not isinstance(text_format, dict) or kind not in ("text", "json_object", "json_schema"):
        raise RequestInvalid("text.format.type", kind, "text, json_object, json_schema")
    if kind == "json_schema":
        return {"type": kind, kind: {key: value for key, value in text_format.items() if key != "type"}}
    return None if kind == "text" else {"type": kind}


def _repeated(own: _Own, others: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the request's fields that the answer repeats. Source: the OpenAI API reference, "The response object"."""

    def other(key: str, default: object) -> object:
        value = msgspec.json.decode(others[key]) if key in others else None
        return default if value is None else value

    reasoning = own.reasoning or {}
    return {
        "instructions": own.instructions,
        "max_output_tokens": own.max_output_tokens,
        "max_tool_calls": own.max_tool_calls,
        "metadata": other("metadata", {}),
        "parallel_tool_calls": other("parallel_tool_calls", default=True),
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": False,
        "temperature": other("temperature", None),
        "text": {"format": {"type": "text"}, **(own.text or {})},
        "tool_choice": own.tool_choice or "auto",
        "tools": own.tools or [],
        "top_logprobs": 0,
        "top_p": other("top_p", None),
        "truncation": "disabled",
        "user": other("user", None),
    }


# ---------------------------------------------------------------- answers
Kind = Literal["message", "reasoning", "function_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS: dict[Kind, str] = {"message": "output_text", "reasoning": "reasoning_text"}


class _Open:
    """The item that is being filled."""

    def __init__(self, kind: Kind, item_id: str, index: int, call: ToolCallStarted | None) -> None:
        self.kind, self.call = kind, call
        self.place: dict[str, Any] = {"item_id": item_id, "output_index": index}
        self.texts: list[str] = []

    def item(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item; without content while it is in progress."""
        item: dict[str, Any] = {"id": self.place["item_id"], "type": self.kind, "status": status}
        text = "".join(self.texts)
        if self.call is not None:
            return item | {"call_id": self.call.id, "name": self.call.name, "arguments": text}
        content: list[dict[str, Any]] = [] if status == "in_progress" else [self.part(text)]
        more: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | more | {"content": content}

    def part(self, text: str) -> dict[str, Any]:
        """Return its content part with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @property
    def logprobs(self) -> dict[str, Any]:
        """The key of log probabilities in the events of its text."""
        return {"logprobs": []} if self.kind == "message" else {}


class ResponseAnswer:
    """Renders one request's answer. `created` is in seconds since 1970."""

    can_go_on = False
    """No other worker can resume its stream."""

    def __init__(self, request: ResponseChat, request_id: str, created: int) -> None:
        self.id, self._name = f"resp_{request_id}", request_id
        self._head = {"id": self.id, "object": "response", "created_at": created, "model": request.model}
        self._repeated = request.kv_response
        self._open: _Open | None = None
        self._done: list[dict[str, Any]] = []
        self._number = 0
        self._finish_reason = ""

    def opening(self) -> bytes:
        """Return the stream's first events."""
        response = self._response("in_progress", None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def events(self, piece: Piece, *, always: bool = False) -> bytes:  # noqa: ARG002
        """Return the stream events of a piece; none if it shows nothing."""
        self._finish_reason = piece.finish_reason or self._finish_reason
        return b"".join(map(self._shown, piece.events))

    def ending(self, usage: dict[str, Any], *, include_usage: bool) -> bytes:  # noqa: ARG002 - it always has it
        """Return the stream's last events."""
        status = self._status
        return self._close(status) + self._event(status, response=self._response(status, usage))

    def failed(self, message: str, _error: bytes) -> bytes:
        """Return the last event of a stream that the engine fails."""
        closed = self._close("incomplete")
        error = {"code": "server_error", "message": message}
        return closed + self._event("failed", response=self._response("failed", None, error))

    def full_body(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> bytes:
        """Return the body of an unstreamed answer."""
        for piece in pieces:
            self.events(piece)
        self._close(self._status)
        return msgspec.json.encode(self._response(self._status, usage))

    def _shown(self, event: Event) -> bytes:
        if isinstance(event, ToolCallStarted):
            return self._close() + self._begin("function_call", event)
        if isinstance(event, ToolCallArguments):
            assert self._open is not None, "a call begins before its arguments"
            self._open.texts.append(event.text)
            return self._event("function_call_arguments.delta", **self._open.place, delta=event.text)
        kind: Kind = "message" if isinstance(event, ContentDelta) else "reasoning"
        before = b""
        if self._open is None or self._open.kind != kind:
            before = self._close() + self._begin(kind)
        assert self._open is not None
        self._open.texts.append(event.text)
        return before + self._event(
            f"{_TEXTS[kind]}.delta", **self._open.place, content_index=0, **self._open.logprobs, delta=event.text
        )

    def _begin(self, kind: Kind, call: ToolCallStarted | None = None) -> bytes:
        index = len(self._done)
        opened = self._open = _Open(kind, f"{_PREFIXES[kind]}_{self._name}{index}", index, call)
        added = self._event("output_item.added", output_index=index, item=opened.item("in_progress"))
        if call is not None:
            return added
        return added + self._event("content_part.added", **opened.place, content_index=0, part=opened.part(""))

    def _close(self, status: ItemStatus = "completed") -> bytes:
        """Return the events that close the open item; none if none is open."""
        last, self._open = self._open, None
        if last is None:
            return b""
        item, text = last.item(status), "".join(last.texts)
        self._done.append(item)
        if last.call is not None:
            done = self._event("function_call_arguments.done", **last.place, name=last.call.name, arguments=text)
        else:
            done = self._event(f"{_TEXTS[last.kind]}.done", **last.place, content_index=0, text=text, **last.logprobs)
            done += self._event("content_part.done", **last.place, content_index=0, part=last.part(text))
        return done + self._event("output_item.done", output_index=last.place["output_index"], item=item)

    @property
    def _status(self) -> ItemStatus:
        """The status of the answer and of its last item."""
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(
        self, status: str, usage: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response object; its usage must be last, where a router reads it."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete,
            "output": list(self._done),
            **self._repeated,
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, what: str, **fields: object) -> bytes:
        """Return the stream's next event: its type without `response.`, and its fields."""
        kind = f"response.{what}"
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


def _usage(of_chat: dict[str, Any]) -> dict[str, Any]:
    cached_tokens = of_chat["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": of_chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": of_chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": of_chat["total_tokens"],
    }
