"""Renders the answers of `/v1/responses`: the Response object, and the events of its stream.

    response.created, response.in_progress    before the first item
    ..                                        events of the items (`response_items.py`)
    response.completed                        the answer ended by itself, or with calls
    response.incomplete                       it reached `max_output_tokens`, or the worker's own limit
    response.failed                           the engine failed

Each event has the next `sequence_number`, from 0. There is no `[DONE]`. `reasoning_tokens` of the usage is 0: reasoning
tokens are not counted separately.
Source: the OpenAI API reference, "The response object" and "Responses: streaming events".
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from worker_agent.api.choice_text import Piece
from worker_agent.api.parsers.events import ContentDelta
from worker_agent.api.response_items import ItemStatus, ResponseItems, StreamEvent
from worker_agent.api.response_requests import ResponseChat
from worker_agent.port.sampling import TokenLogprobs


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
