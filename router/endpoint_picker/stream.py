"""One request of a gateway as a state machine without I/O: `receive` takes an event and returns commands.

    request    RequestCame ─> RequestBody ... ─> Begin                           the router reads and decides
    placing    Placed ─> header lines, destination, body                         the gateway sends the request
               Answered ─> Immediate                                             no worker gets it
    answer     AnswerCame ─> JudgeHead ─> Accepted ─> header lines               the gateway passes the answer on
               AnswerBody ... ─> AnswerGoesOn, AnswerOver
    over       what still comes is passed on unread

| the gateway sends bodies | request | answer |
|---|---|---|
| buffered | the head is passed on at once; header lines and the destination in the reply to the body | one message |
| full_duplex | nothing is passed on before the decision; the body is sent back in chunks | each chunk is sent back |
| streamed | refused: by then a worker has the head | each chunk is acknowledged |
| none | refused, unless the request has no body | the answer ends, for the router, with its head |

Source: `envoy/service/ext_proc/v3/external_processor.proto` of Envoy 1.40; docs/SOURCES.md, D11.
"""

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from router.endpoint_picker.messages import (
    AnswerBody,
    AnswerCame,
    AnswerTrailers,
    BodyChunk,
    BodyMode,
    BodyReply,
    FromGateway,
    HeadersReply,
    Immediate,
    Lines,
    RequestBody,
    RequestCame,
    RequestTrailers,
    ToGateway,
    TrailersReply,
)
from router.http import refusals
from router.http.refusals import Refusal

CHUNK_BYTES_MAX = 64 << 10
"""Parts in which a request's body is sent back."""
TAIL_BYTES = 4096
_JSON = (b"content-type", b"application/json")
_DONE = b"data: [DONE]"
_EVENT_END = re.compile(rb"\n\r?\n")
_READ: tuple[BodyMode, ...] = ("buffered", "full_duplex")
_NAMES: dict[BodyMode, str] = {
    "none": "NONE", "streamed": "STREAMED", "buffered": "BUFFERED", "buffered_partial": "BUFFERED_PARTIAL",
    "full_duplex": "FULL_DUPLEX_STREAMED", "grpc": "GRPC",
}  # fmt: skip


class Placed(msgspec.Struct, frozen=True):
    """The router chose: the gateway is to send the request there."""

    destination: str
    lines: Lines
    removed: tuple[str, ...]
    body: bytes
    token_mark: bytes = b""
    """As of `OutboundCall`."""


class Answered(msgspec.Struct, frozen=True):
    """The router answers the client itself."""

    status: int
    headers: Lines
    body: bytes


class Accepted(msgspec.Struct, frozen=True):
    """The answer's head may be passed on, with these header lines."""

    lines: Lines = ()


class Begin(msgspec.Struct, frozen=True):
    """The request is complete: read it and decide."""

    head: RequestCame
    body: bytes


class JudgeHead(msgspec.Struct, frozen=True):
    """The answer's head came: say whether it may be passed on."""

    head: AnswerCame


class AnswerGoesOn(msgspec.Struct, frozen=True):
    """Bytes of an event stream came."""

    is_first: bool


class AnswerOver(msgspec.Struct, frozen=True):
    """The answer is complete, as far as the gateway shows it. As `ResponseHandler.on_end`."""

    tail: bytes
    later_events: int


class Left(msgspec.Struct, frozen=True):
    """The gateway gave the request up: its client left, or a worker failed in the middle of its answer."""


ToRouter = Begin | JudgeHead | AnswerGoesOn | AnswerOver | Left
Commands = tuple[ToGateway | ToRouter, ...]
_NOTHING: Commands = ()


class OutOfOrder(Exception):
    """A gateway sent a message that may not come at this place of the stream."""


class GatewayStream:
    """One stream. `body_bytes_max` bounds the request's body."""

    __slots__ = (
        "_answer_mode", "_body", "_complete", "_head", "_request_mode", "_state", "_tally", "_trailers",
        "body_bytes_max",
    )  # fmt: skip

    def __init__(self, body_bytes_max: int) -> None:
        self.body_bytes_max = body_bytes_max
        self._state: Literal["request", "placing", "sent", "judging", "answer", "over"] = "request"
        self._request_mode: BodyMode = "buffered"
        self._answer_mode: BodyMode | None = None
        self._head: RequestCame | None = None
        self._body = bytearray()
        self._complete = b""  # the body, which the router has too: once in memory
        self._trailers = False
        self._tally = AnswerTally()

    @property
    def awaits_router(self) -> bool:
        """Whether the gateway waits for the router."""
        return self._state == "placing"

    @property
    def reads_request(self) -> bool:
        """Whether more of the request is expected."""
        return self._state == "request"

    @property
    def body_comes_whole(self) -> bool:
        """Whether the head came, and the gateway sends the body as one message once it has all of it."""
        return self._head is not None and self._request_mode == "buffered"

    @property
    def body_bytes(self) -> int:
        """Bytes of the request's body that came."""
        return len(self._body) + len(self._complete)

    def receive(self, event: FromGateway | Placed | Answered | Accepted) -> Commands:
        """Take an event; return what is to be sent to the gateway and done by the router, in this order.

        Raises:
            OutOfOrder: the request's head is missing, or is the second one.
        """
        return _STEPS[type(event)](self, event)

    def closed(self) -> Commands:
        """The gateway closed the stream."""
        state, self._state = self._state, "over"
        return (Left(),) if state in ("placing", "sent", "judging", "answer") else _NOTHING

    # ------------------------------------------------------------------------------------------- the request

    def _request_came(self, event: RequestCame) -> Commands:
        if self._head is not None:
            raise OutOfOrder("request_headers: found a second message, allowed one a stream")
        self._head, modes = event, event.modes
        if modes is not None:
            self._request_mode, self._answer_mode = modes.request, modes.answer
        if event.is_last:
            return self._begin()
        if self._request_mode not in _READ:
            return self.refuse(_unread(self._request_mode))
        return (HeadersReply("request"),) if self._request_mode == "buffered" else _NOTHING

    def _request_body(self, event: RequestBody) -> Commands:
        if self._state != "request":
            return _NOTHING
        if len(self._body) + len(event.data) > self.body_bytes_max:
            message = f"body: found more than {self.body_bytes_max} bytes, allowed data.body_bytes_max"
            return self.refuse(refusals.invalid(message, "body", "body_too_large", 413))
        self._body += event.data
        return self._begin() if event.is_last or self._request_mode == "buffered" else _NOTHING

    def _request_trailers(self, _event: RequestTrailers) -> Commands:
        if self._state == "request":
            self._trailers = True
            return self._begin()
        return (TrailersReply("request"),)

    def _begin(self) -> Commands:
        if self._head is None:
            raise OutOfOrder("request_body or request_trailers: found as the first message, allowed request_headers")
        self._state = "placing"
        self._complete, self._body = bytes(self._body), bytearray()
        return (Begin(self._head, self._complete),)

    def refuse(self, refusal: Refusal) -> Commands:
        """Answer the client with an error."""
        self._state = "over"
        return (Immediate(refusal.status, (_JSON,), refusal.body),)

    def _placed(self, event: Placed) -> Commands:
        if self._state != "placing":  # the gateway has sent the request already, to another endpoint of the list
            return _NOTHING
        self._state = "sent"
        self._tally.token_mark = event.token_mark
        head = event.lines, event.removed, event.destination
        if self._head is not None and self._head.is_last:
            return (HeadersReply("request", *head),)
        if self._request_mode == "buffered":
            return (BodyReply("request", *head, None if event.body == self._complete else event.body),)
        chunks = self._chunks(event.body)
        return (HeadersReply("request", *head), *chunks, *((TrailersReply("request"),) if self._trailers else ()))

    def _chunks(self, body: bytes) -> tuple[BodyChunk, ...]:
        starts = range(0, len(body), CHUNK_BYTES_MAX) or (0,)
        last = starts[-1]
        view = memoryview(body)
        return tuple(
            BodyChunk("request", view[at : at + CHUNK_BYTES_MAX], is_last=at == last and not self._trailers)
            for at in starts
        )

    def _answered(self, event: Answered) -> Commands:
        if self._state in ("answer", "over"):  # the client has the beginning of an answer
            return _NOTHING
        self._state = "over"
        return (Immediate(event.status, event.headers, event.body),)

    # ------------------------------------------------------------------------------------------- the answer

    def _answer_came(self, event: AnswerCame) -> Commands:
        if self._state != "sent":
            return (HeadersReply("answer"),)
        self._state = "judging"
        self._tally.is_stream = event.is_stream
        self._tally.ends_with_head = event.is_last or self._answer_mode in (None, "none")
        return (JudgeHead(event),)

    def _accepted(self, event: Accepted) -> Commands:
        assert self._state == "judging", "the router judges one head"
        tally = self._tally
        reply = HeadersReply("answer", event.lines)
        if not tally.ends_with_head:
            self._state = "answer"
            return (reply,)
        self._state = "over"
        begun = (AnswerGoesOn(is_first=True),) if tally.is_stream else ()
        return (reply, *begun, AnswerOver(b"", 0))

    def _answer_body(self, event: AnswerBody) -> Commands:
        is_duplex = self._answer_mode == "full_duplex"
        reply = BodyChunk("answer", event.data, event.is_last) if is_duplex else BodyReply("answer")
        if self._state != "answer":
            return (reply,)
        goes_on = self._tally.add(event.data)
        is_over = event.is_last or self._answer_mode == "buffered"
        return (reply, *goes_on, *(self._end() if is_over else ()))

    def _answer_trailers(self, _event: AnswerTrailers) -> Commands:
        return (TrailersReply("answer"), *(self._end() if self._state == "answer" else ()))

    def _end(self) -> tuple[AnswerOver]:
        self._state = "over"
        return (self._tally.end(),)

    @classmethod
    def steps(cls) -> dict[type, Callable[["GatewayStream", Any], Commands]]:
        """Return the method of each kind of event."""
        return {
            RequestCame: cls._request_came,
            RequestBody: cls._request_body,
            RequestTrailers: cls._request_trailers,
            Placed: cls._placed,
            Answered: cls._answered,
            AnswerCame: cls._answer_came,
            Accepted: cls._accepted,
            AnswerBody: cls._answer_body,
            AnswerTrailers: cls._answer_trailers,
        }


def _unread(mode: BodyMode) -> Refusal:
    message = f"the gateway's request_body_mode: found {_NAMES[mode]}, allowed BUFFERED or FULL_DUPLEX_STREAMED"
    return Refusal(500, message, "server_error", code="gateway_body_mode", outcome="failed")


class AnswerTally:
    """What of an answer's body counts: its end, and its events behind the first bytes."""

    __slots__ = ("_later_events", "_tail", "ends_with_head", "has_begun", "is_stream", "token_mark")

    def __init__(self) -> None:
        self._tail = b""
        self._later_events = 0
        self.is_stream = self.ends_with_head = self.has_begun = False
        self.token_mark = b""

    def add(self, data: bytes) -> tuple[AnswerGoesOn, ...]:
        """Count more bytes; return what the router is told of them."""
        if not data:
            return ()
        before, is_first = self._tail, not self.has_begun
        self.has_begun = True
        if self.is_stream and not is_first:
            self._later_events += self._ends(before[-self._overlap :] + data) - self._ends(before[-self._overlap :])
        self._tail = (before + data)[-TAIL_BYTES:]
        return (AnswerGoesOn(is_first),) if self.is_stream else ()

    @property
    def _overlap(self) -> int:
        """Bytes of an end that may precede new bytes."""
        return max(2, len(self.token_mark) - 1)

    def _ends(self, data: bytes) -> int:
        return data.count(self.token_mark) if self.token_mark else len(_EVENT_END.findall(data))

    def end(self) -> AnswerOver:
        """Return the end of the answer."""
        has_mark = not self.token_mark and self._later_events > 0 and self._tail.rstrip().endswith(_DONE)
        return AnswerOver(self._tail, self._later_events - has_mark)


_STEPS = GatewayStream.steps()
