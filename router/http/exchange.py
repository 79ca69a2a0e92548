"""The interface between connections and the service that decides: one request and its answer.

    service(exchange)  ->  exchange.answer(...)                 our own answer
                       ->  exchange.forward(call, watcher)      a worker's answer, relayed; a `ResponseHandler` watches,
                                                                which may forward another call, or answer
                       ->  exchange.when_gone = callback        the client left: no call of the watcher follows

All of it happens in callbacks of one event loop, and none of them may block.
"""

import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from kv_protocol.body_limits import Bytes
from router.http.accounts import Account
from router.http.heads import LAST_CHUNK, Headers, chunk
from router.http.refusals import Refusal, unavailable
from router.http.stream_replay import StreamReplayBuffer
from router.native import built

if TYPE_CHECKING:
    from router.http.upstreams import Upstreams, WorkerConnection

UpstreamStage = Literal["local", "connect", "first_byte", "body"]
"""Where a call failed: at a limit of the router ("local"), which says nothing of the worker; else the call's step."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode("ascii") for each in HTTPStatus}
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
BUFFERED_BYTES_MAX = 256 << 10
"""Longer answers, and longer events, are passed on before they are complete."""
ASIDE_BYTES_MAX = 4 << 20
"""Most bytes of a prefill worker's answer: its handoff may have a megabyte of state, in base64."""
_HEAD_END = b"\r\n\r\n"
JSON, EVENT_STREAM = b"application/json", b"text/event-stream"
HeaderLines = Sequence[tuple[bytes, bytes]]


class CallLimits(NamedTuple):
    """How long each step of a call may take, in seconds."""

    first_byte_s: float
    """Until the answer's first byte, from `forward` on, connecting included."""
    between_bytes_s: float
    """Between two reads of the answer."""
    total_s: float


class OutboundCall(msgspec.Struct, frozen=True):
    """A request to a worker: `base_url` + `path`, header lines that end by CRLF (no host, no length), the body.

    `replay_buffer` gets the events of a stream, and returns what the client gets of them.
    """

    base_url: str
    path: str
    headers: bytes
    body: Bytes | tuple[Bytes | memoryview, ...]
    limits: CallLimits
    replay_buffer: StreamReplayBuffer | None = None
    is_once: bool = False
    """The call can be answered only once: it is never sent again. When the client leaves, the worker's connection is
    closed once the answer has begun."""
    buffered_bytes_max: int = BUFFERED_BYTES_MAX
    """An answer that is no stream, up to this size, is passed on once it is complete. Until then the request can be
    retried at another worker."""
    token_mark: bytes = b""
    """Bytes in each event with tokens of a response's stream, and in no other event; empty: all events have tokens."""
    alternatives: tuple[str, ...] = ()
    """Base URLs of workers to which a gateway may send the same call if this one fails, best first."""
    method: str = "POST"


class ResponseHandler(Protocol):
    """The handler of a forwarded call.

    The last call is `on_dropped`, `on_end`, `on_failed`, or an `on_cut` that returns bytes. If the client leaves,
    the plane stops or the router fails before, the exchange's `when_gone` is called instead, and no method after it.
    `on_failed` may be called before `forward` returns.
    """

    def on_head(self, status: int, headers: Headers, is_stream: bool) -> bytes | None:  # noqa: FBT001 - a fact
        """Return header lines to add to the answer (each ended by CRLF); None: the answer is not passed on.

        `is_stream`: its body has events.
        """

    def on_dropped(self) -> None:
        """The answer that `on_head` refused is read or closed: `forward` or `answer` may be called."""

    def on_first_byte(self) -> None:
        """The first byte of the answer's body came. Not called for an answer that came complete: `on_end` follows."""

    def on_bytes(self) -> None:
        """Bytes came since the last check of timeouts, and `on_first_byte` was called before."""

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The complete answer was passed on; `tail` is the end of its body, 4 KB at most, empty without a body.

        `later_events` counts the events of a stream after its first bytes, without the mark of its end.
        """

    def reason_to_stop(self, quiet_s: float, begun: bool) -> str:  # noqa: FBT001 - a fact
        """Return why to stop waiting for the answer, which fails the call; empty: go on. Called at each timeout check.

        `quiet_s`: seconds since the last byte, or since the call was sent. `begun`: the client has part of the answer.
        """

    def on_cut(self, stage: UpstreamStage, reason: str) -> bytes | None:
        """The worker failed in the middle of an event stream with a replay buffer; return what the client gets next.

        None: an error event, and `on_failed` follows. b"": the handler forwards another call. Else: the stream's end.
        """

    def on_failed(self, stage: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The worker failed. `begun`: the client has part of the answer, which was ended; else it still waits."""


class ClientEnd(Protocol):
    """The client's connection, as a request sees it; or an object in its place."""

    http_1_1: bool
    writing_paused: bool
    """Whether the client reads too slowly: a worker is read only once `relay.resume` is called."""

    @property
    def outward(self) -> "Upstreams":
        """The pool that sends calls to workers."""

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Send a complete answer of the router, which ends the exchange."""

    def write(self, data: bytes, /) -> None:
        """Send bytes of an answer."""

    def finish(self) -> None:
        """The answer is complete: the next request may come."""

    def cut(self) -> None:
        """The answer stays incomplete: close the connection, so that the client cannot take it for a complete one."""


def header_lines(lines: bytes) -> HeaderLines:
    """Return header lines, each ended by CRLF, as names and values."""
    parted = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return tuple((name, value) for name, _, value in parted)


def own_answer(status: int, body: bytes, content_type: bytes, headers: HeaderLines, connection_line: bytes) -> bytes:
    """Return an answer of the router itself; `connection_line` ends with CRLF, or is empty."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    more = b"".join([b"%b: %b\r\n" % each for each in headers]) + connection_line
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (line, content_type, len(body), more, body)


def error_events(error: bytes, *, mid_event: bool = False) -> bytes:
    """Return the end of an event stream that failed: the error's body as an event, and the end mark."""
    return b"%bdata: %b\n\ndata: [DONE]\n\n" % (b"\n\n" if mid_event else b"", error)


def response_error_event(message: str, code: str, passed_on: bytes, *, mid_event: bool = False) -> bytes:
    """Return the end of a response's stream that failed; `passed_on` is the end of what the client has of it.

    Source: the OpenAI API reference, "Responses: streaming events", `error`.
    """
    numbers = _SEQUENCE_NUMBER.findall(passed_on)
    number = int(numbers[-1]) + 1 if numbers else 0
    error = {"type": "error", "sequence_number": number, "code": code, "message": message, "param": None}
    return b"%bevent: error\ndata: %b\n\n" % (b"\n\n" if mid_event else b"", msgspec.json.encode(error))


class Exchange(msgspec.Struct, eq=False):
    """One complete request of a client, and the means to answer it exactly once."""

    client: ClientEnd | None
    """None once it left or was answered."""
    method: str
    path: str
    query: str
    headers: Headers
    body: Bytes
    began_s: float
    """`perf_counter` at the request's first byte."""
    connection_line: bytes = b""
    """Header lines of an answer: whether the connection ends, and which page may read it."""
    account: Account | None = None
    """The account of the request's key; None: the request needs no key."""
    relay: "WorkerConnection | None" = None
    """The relay of the forwarded call; None: nothing is forwarded."""
    has_begun: bool = False
    """Whether the client has the beginning of a worker's answer. If nothing is forwarded at the moment, this answer is
    an event stream, and another call or the router continues it."""
    is_stream: bool = False
    is_mid_event: bool = False
    """Whether the client has only the beginning of an event."""
    when_gone: Callable[[int], None] | None = None
    """Called if the client leaves, the plane stops or the router fails before the answer ends. It gets the number of
    `later_events` so far, as `on_end` does."""

    @property
    def outward(self) -> "Upstreams":
        """The pool that sends calls to workers; the client must still be there."""
        assert self.client is not None
        return self.client.outward

    @property
    def probe(self) -> bytes:
        """Bytes that may be sent to the client now without changing the answer's meaning; empty: none.

        Before the answer: an interim answer (not in HTTP/1.0: RFC 9110, 15.2); between two events of it: a comment.
        """
        client = self.client
        if client is None:
            return b""
        if not self.has_begun:
            return CONTINUE if client.http_1_1 else b""
        if not self.is_stream or self.is_mid_event:
            return b""
        return chunk(_COMMENT) if client.http_1_1 else _COMMENT

    def answer(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: HeaderLines = ()) -> None:
        """Send a complete answer. Do nothing if the client left or was answered.

        If an event stream has begun, `body` ends it. Unless `content_type` is `EVENT_STREAM`, `body` is sent as one
        event, and the end mark follows.
        """
        client = self.client
        if client is not None:
            assert self.relay is None, "a call is being forwarded"
            if self.has_begun:
                self.end_stream(body if content_type == EVENT_STREAM else error_events(body))
            else:
                self.close()
                client.reply(status, body, content_type, headers)

    def refuse(self, refusal: Refusal, *headers: tuple[bytes, bytes]) -> None:
        """Answer with the refusal, and these further headers."""
        self.answer(refusal.status, refusal.body, headers=(*refusal.headers, *headers))

    def end_stream(self, events: bytes) -> None:
        """Send these events as the end of the stream that has begun. Do nothing if the client left."""
        client = self.client
        if client is not None:
            self.close()
            client.write(chunk(events) + LAST_CHUNK if client.http_1_1 else events)
            client.finish()

    def end_with_error(self, message: str, code: str, call: OutboundCall, passed_on: bytes) -> None:
        """End the answer that has begun: an event stream by an error event, else cut the client off.

        `passed_on`: the end of what the client has of the call's answer.
        """
        if not self.is_stream:
            self.cut()
        elif call.token_mark:
            self.end_stream(response_error_event(message, code, passed_on, mid_event=self.is_mid_event))
        else:
            self.end_stream(error_events(unavailable(message, code).body, mid_event=self.is_mid_event))

    def cut(self) -> None:
        """End the connection within the answer. Do nothing if the client left."""
        client = self.client
        self.close()
        if client is not None:
            client.cut()

    def forward(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call to its worker and relay the answer. Do nothing if the client left."""
        client = self.client
        if client is None:
            return
        outward = client.outward
        origin = outward.origins[call.base_url]
        if not built.send(origin, self, call, watcher):
            outward.dial(origin, self, call, watcher)

    def close(self) -> None:
        """The exchange is over: detach its callbacks."""
        self.client = self.when_gone = self.relay = None

    def expire(self) -> None:
        """The plane stops: end the call as if the client had left, then end the answer."""
        relay, callback, later_events, message = self.relay, self.when_gone, 0, "the router stops; try again"
        if relay is not None:
            message, call, passed_on = "the router stops; the answer was not complete in time", relay.call, relay.tail
            later_events = relay.leave(self, at_once=True)
        if callback is not None:
            callback(later_events)
        if relay is not None and self.has_begun:
            self.end_with_error(message, "shutting_down", call, passed_on)
        else:
            self.refuse(unavailable(message, "shutting_down"))

    def leave(self) -> None:
        """The client left: end the call, and call `when_gone`."""
        relay, callback = self.relay, self.when_gone
        self.close()
        later_events = 0 if relay is None else relay.leave(self)
        if callback is not None:
            callback(later_events)


class BufferedResponse:
    """Stands in for the connection of a client, for an answer that is not relayed to one, such as a prefill worker's.

    It keeps `ASIDE_BYTES_MAX` of a worker's answer at most, head included; the call of a longer one fails.
    """

    __slots__ = ("_exchange", "_size", "_written", "outward")

    http_1_1 = writing_paused = False
    """`write` gets bodies without chunks, as a client of HTTP/1.0 does."""

    def __init__(self, outward: "Upstreams") -> None:
        self.outward = outward
        self._exchange: Exchange | None = None
        self._written: list[bytes] = []
        self._size = 0

    def ask(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call to its worker. `watcher` gets its events, and may read `body` when the answer has ended.

        If the router fails, `watcher.on_failed` is called.
        """
        exchange = self._exchange = Exchange(self, "POST", call.path, "", {}, b"", 0.0)
        exchange.when_gone = lambda _: watcher.on_failed("body", "our fault; see the log", exchange.has_begun)
        self._written.clear()
        self._size = 0
        exchange.forward(call, watcher)

    def give_up(self) -> None:
        """Close the worker's connection, if there is one: the answer is not wanted any more."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.when_gone = None
            exchange.leave()

    @property
    def body(self) -> bytes:
        """The answer's body, as far as it was received."""
        return b"".join(self._written).partition(_HEAD_END)[2]

    # ------------------------------------------------------------ as a client's connection

    def write(self, data: bytes) -> None:
        """Keep received bytes of the answer."""
        self._size += len(data)
        if self._size <= ASIDE_BYTES_MAX:
            self._written.append(data)
        elif self._exchange is not None and self._exchange.relay is not None:
            self._exchange.is_mid_event = True  # what is kept is not complete, though the worker may have sent `[DONE]`
            self._exchange.relay.fail("body", f"an answer of more than {ASIDE_BYTES_MAX} bytes")

    def finish(self) -> None:
        """The answer is over; if it is cut, the handler of the call was called already."""
        self._exchange = None

    cut = finish

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Ignore an answer of the router itself: the handler of the call got the reason already."""
