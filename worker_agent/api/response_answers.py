"""Renders the answers of `/v1/responses`: the Response object with its output items, and the events of its stream.

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
Source: the OpenAI API reference, "The response object" and "Responses: streaming events".
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from worker_agent.api.choice_text import Piece
from worker_agent.api.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallStarted
from worker_agent.api.response_requests import ResponseChat
from worker_agent.port.sampling import TokenLogprobs

Kind = Literal["message", "reasoning", "function_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class StreamEvent(NamedTuple):
    """One event of a response's stream: its type without `response.`, and its fields."""

    type: str
    fields: dict[str, Any]


class _Open:
    """The item that is being filled."""

    def __init__(self, kind: Kind, item_id: str, index: int, call: ToolCallStarted | None) -> None:
        self.kind, self.call = kind, call
        self.item_fields: dict[str, Any] = {"item_id": item_id, "output_index": index}
        self.texts: list[str] = []

    def item(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item; without content while it is in progress."""
        item: dict[str, Any] = {"id": self.item_fields["item_id"], "type": self.kind, "status": status}
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


class ResponseItems:
    """The items of one response; `name` is part of their ids."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: _Open | None = None
        self.done: list[dict[str, Any]] = []
        """All closed items, in order."""

    def feed(self, event: Event) -> list[StreamEvent]:
        """Take the next event of the answer; return the events that it adds to the response's stream."""
        if isinstance(event, ToolCallStarted):
            return self.close() + self._opened("function_call", event)
        if isinstance(event, ToolCallArguments):
            assert self._open is not None, "a call begins before its arguments"
            return [self._more(self._open, "function_call_arguments", event.delta)]
        kind: Kind = "message" if isinstance(event, ContentDelta) else "reasoning"
        before: list[StreamEvent] = []
        if self._open is None or self._open.kind != kind:
            before = self.close() + self._opened(kind, None)
        assert self._open is not None
        return [*before, self._more(self._open, _TEXTS[kind], event.text)]

    def close(self, status: ItemStatus = "completed") -> list[StreamEvent]:
        """Return the stream events that close the open item; none if none is open."""
        last, self._open = self._open, None
        if last is None:
            return []
        item, text = last.item(status), "".join(last.texts)
        self.done.append(item)
        ended = StreamEvent("output_item.done", {"output_index": last.item_fields["output_index"], "item": item})
        if last.call is not None:
            done_fields = {**last.item_fields, "name": last.call.name, "arguments": text}
            return [StreamEvent("function_call_arguments.done", done_fields), ended]
        done_fields = {**last.item_fields, "content_index": 0, "text": text} | _logprobs(last.kind)
        part = {**last.item_fields, "content_index": 0, "part": last.part(text)}
        return [StreamEvent(f"{_TEXTS[last.kind]}.done", done_fields), StreamEvent("content_part.done", part), ended]

    def _opened(self, kind: Kind, call: ToolCallStarted | None) -> list[StreamEvent]:
        index = len(self.done)
        opened = self._open = _Open(kind, f"{_PREFIXES[kind]}_{self._name}{index}", index, call)
        events = [StreamEvent("output_item.added", {"output_index": index, "item": opened.item("in_progress")})]
        if call is None:
            part = {**opened.item_fields, "content_index": 0, "part": opened.part("")}
            events.append(StreamEvent("content_part.added", part))
        return events

    @staticmethod
    def _more(opened: _Open, what: str, delta: str) -> StreamEvent:
        opened.texts.append(delta)
        content = {} if opened.call is not None else {"content_index": 0} | _logprobs(opened.kind)
        return StreamEvent(f"{what}.delta", {**opened.item_fields, **content, "delta": delta})


_PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS: dict[Kind, str] = {"message": "output_text", "reasoning": "reasoning_text"}


def _logprobs(kind: Kind) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


class ResponseAnswer:
    """Renders one request's answer. `created` is in seconds since 1970."""

    choices = 1
    can_go_on = False
    """No other worker can resume its stream."""

    def __init__(self, request: ResponseChat, request_id: str, created: int) -> None:
        self.id = f"resp_{request_id}"
        self._head = {"id": self.id, "object": "response", "created_at": created, "model": request.model}
        self._repeated = request.kv_response
        self._items = ResponseItems(request_id)
        self._number = 0
        self._finish_reason = ""

    def opening(self) -> bytes:
        """Return the stream's first events."""
        response = self._response("in_progress", None)
        fields = {"response": response}
        return self._sse([StreamEvent("created", fields), StreamEvent("in_progress", fields)])

    def events(self, piece: Piece, prompt: Sequence[int] = (), *, always: bool = False) -> bytes:  # noqa: ARG002
        """Return the stream events of a piece; none if it shows nothing."""
        return self._sse(self._fed(piece))

    def ending(self, usage: dict[str, Any], *, include_usage: bool) -> bytes:  # noqa: ARG002 - it always has it
        """Return the stream's last events."""
        status = self._status
        closed = self._items.close(status)
        return self._sse([*closed, StreamEvent(status, {"response": self._response(status, usage)})])

    def failed(self, message: str, _error: bytes) -> bytes:
        """Return the last event of a stream that the engine fails."""
        closed = self._items.close("incomplete")
        error = {"code": "server_error", "message": message}
        return self._sse([*closed, StreamEvent("failed", {"response": self._response("failed", None, error)})])

    def full_body(
        self,
        pieces: Sequence[Piece],
        usage: dict[str, Any],
        *,
        prompt: Sequence[int] = (),  # noqa: ARG002 - a chat's answer says it
        prompt_with_logprobs: tuple[tuple[int, ...], Sequence[TokenLogprobs | None]] | None = None,  # noqa: ARG002
    ) -> bytes:
        """Return the body of an unstreamed answer."""
        for piece in pieces:
            self._fed(piece)
        self._items.close(self._status)
        return msgspec.json.encode(self._response(self._status, usage))

    def _fed(self, piece: Piece) -> list[StreamEvent]:
        self._finish_reason = piece.finish_reason or self._finish_reason
        events = piece.events
        if events is None:
            events = (ContentDelta(piece.text),) if piece.text else ()
        return [each for event in events for each in self._items.feed(event)]

    @property
    def _status(self) -> ItemStatus:
        """The status of the answer and of its last item."""
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(
        self, status: str, usage: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the object; the usage is last, where a router reads it."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete,
            "output": list(self._items.done),
            **self._repeated,
            "usage": None if usage is None else _usage(usage),
        }

    def _sse(self, events: Sequence[StreamEvent]) -> bytes:
        return b"".join(map(self._numbered, events))

    def _numbered(self, event: StreamEvent) -> bytes:
        kind = f"response.{event.type}"
        data = {"type": kind, "sequence_number": self._number, **event.fields}
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
