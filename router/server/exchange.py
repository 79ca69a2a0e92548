"""The interface between connections and the service that decides: one request and its answer.

    service(exchange)  ->  exchange.answer(...)                     our own answer
                       ->  exchange.forward(call, watcher)          a worker's answer, spliced
                               on_head -> None, on_dropped          not passed on: forward again, or answer
                               on_failed(begun=False)               nothing was passed on: forward again, or answer
                               on_cut -> b"", then forward          the event stream goes on with another call's
                               on_failed(begun=True)                over: the client has an error, or was cut off
                               on_end                               over
                       ->  exchange.on_gone(callback)               for as long as nothing is forwarded

When the client leaves, one callback is called: the watcher's while a call is forwarded, else that given to `on_gone`.
All of it happens in callbacks of one event loop, and none of them may block.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from kv_protocol.body_limits import Bytes
from router.server.framing import LAST_CHUNK, chunk
from router.server.heads import Headers, RequestHead
from router.server.stream_replay import StreamReplayBuffer

UpstreamStage = Literal["local", "connect", "first_byte", "body"]
"""Where a call failed: "local" is a limit of the router, which says nothing of the worker; the others are its steps."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
BUFFERED_BYTES_MAX = 256 << 10
"""Longer answers, and longer events, are passed on before they are complete."""
HeaderLines = Sequence[tuple[bytes, bytes]]


class OutboundCall(NamedTuple):
    """A request to a worker: `base_url` + `path`, header lines that end by CRLF (no host, no length), the body's parts.

    The limits are seconds: until the connection stands, until the answer's first byte (from `forward` on, connecting
    included), between two reads of it, and for all of it. `replay_buffer` gets the events of a stream, and returns what
    of them is passed on.
    """

    base_url: str
    path: str
    headers: bytes
    body: bytes | tuple[Bytes | memoryview, ...]
    connect_s: float
    first_byte_s: float
    between_bytes_s: float
    total_s: float
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
    """The handler of a forwarded call. `on_dropped`, `on_end`, `on_failed` and `on_gone` are its last events.

    `on_failed` and `on_gone` may come before `forward` returns.
    """

    def on_head(self, status: int, headers: Headers) -> bytes | None:
        """Return header lines to add to the answer (each ended by CRLF); None: the answer is not passed on."""

    def on_dropped(self) -> None:
        """The answer that `on_head` refused is read or closed: `forward` or `answer` may be called."""

    def on_first_byte(self) -> None:
        """The first byte of the answer's body came. Not called for an answer that came complete: `on_end` follows."""

    def on_bytes(self) -> None:
        """More bytes came."""

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The complete answer was passed on; `tail` is the end of its body, 4 KB at most, empty without a body.

        `later_events` counts the events of a stream behind its first bytes, without the mark of its end.
        """

    def lost(self, quiet_s: float, begun: bool) -> str:  # noqa: FBT001 - a fact
        """Return why the answer is not awaited any more, which fails the call; empty: it is. Asked again and again.

        `quiet_s`: since the last byte, or since the call was sent. `begun`: the client has part of the answer.
        """

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:
        """The worker failed in the middle of an event stream with a replay buffer; return what the client gets next.

        None: an error event, and `on_failed` follows. b"": the handler forwards another call. Else: the stream's end.
        """

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The worker failed. `begun`: the client has part of the answer, which was ended; else it still waits."""

    def on_gone(self) -> None:
        """The client left; the worker's connection was closed."""


class UpstreamCall(Protocol):
    """A call in flight, as the client's connection sees it."""

    @property
    def probe(self) -> bytes:
        """Bytes that may be sent to the client now without changing the answer's meaning; empty: none."""

    def leave(self) -> None:
        """The client left."""

    def pause(self) -> None:
        """The client reads too slowly: read nothing more until `resume`."""

    def resume(self) -> None:
        """The client has read the pending bytes."""

    def expire(self) -> None:
        """The plane stops: end the answer now."""


class ResponseSink(Protocol):
    """Where an answer is written: a client's connection, or an object in its place."""

    http_1_1: bool

    @property
    def connection_line(self) -> bytes:
        """Header lines of the connection: whether it ends, and which page may read the answer. Read with the head."""

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Send a complete answer of the router, which ends the exchange."""

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""

    def finish(self) -> None:
        """The answer is complete: the next request may come."""

    def cut(self) -> None:
        """The answer stays incomplete: close the connection, so that the client cannot take it for a complete one."""


class UpstreamPool(Protocol):
    """Sends calls to workers."""

    def forward(
        self, exchange: "Exchange", client: ResponseSink, call: OutboundCall, watcher: ResponseHandler, now_s: float
    ) -> None:
        """Send the call, and relay its answer to `client`; `now_s` is the loop's time."""


class ClientEnd(ResponseSink, Protocol):
    """The client's connection, as a request sees it."""

    @property
    def peer(self) -> str:
        """Host and port."""

    @property
    def outward(self) -> UpstreamPool:
        """The pool that sends its calls to workers."""

    def forward(self, exchange: "Exchange", call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call and relay its answer."""


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


def head_probe(client: ResponseSink) -> bytes:
    """Return a probe to be sent before an answer: an interim answer, which HTTP/1.0 lacks (RFC 9110, 15.2)."""
    return CONTINUE if client.http_1_1 else b""


def event_probe(client: ResponseSink) -> bytes:
    """Return a probe to be sent between two events of a stream: a comment."""
    return chunk(_COMMENT) if client.http_1_1 else _COMMENT


class Exchange:
    """One complete request of a client, and the means to answer it exactly once."""

    __slots__ = ("_client", "_on_gone", "began_s", "body", "carried", "headers", "is_begun", "method", "path", "query")

    def __init__(self, client: ClientEnd, head: RequestHead, body: Bytes, began_s: float) -> None:
        self._client: ClientEnd | None = client
        self.method, self.path, self.query = head.method, head.path, head.query
        self.headers: Headers = head.headers
        self.body = body
        self.began_s = began_s
        """`perf_counter` at its first byte."""
        self.carried: UpstreamCall | None = None
        self.is_begun = False
        """Whether the client has the beginning of an event stream that is to be continued."""
        self._on_gone: Callable[[], None] | None = None

    @property
    def peer(self) -> str:
        """Host and port of the client; empty once it left or was answered."""
        return "" if self._client is None else self._client.peer

    @property
    def open(self) -> bool:
        """Whether the client still waits for the answer."""
        return self._client is not None

    @property
    def probe(self) -> bytes:
        """Bytes that may be sent to the client now without changing the answer's meaning; empty: none."""
        client = self._client
        if client is None or self.carried is not None:
            return b"" if self.carried is None else self.carried.probe
        return event_probe(client) if self.is_begun else head_probe(client)

    def answer(
        self, status: int, body: bytes, *, content_type: bytes = b"application/json", headers: HeaderLines = ()
    ) -> None:
        """Send a complete answer. Do nothing if the client left or was answered.

        Where an event stream has begun, it ends with `body` as its last event.
        """
        client = self._client
        if client is not None:
            assert self.carried is None, "a call is being forwarded"
            if self.is_begun:
                self.end_stream(error_events(body))
            else:
                self.close()
                client.reply(status, body, content_type, headers)

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client leaves while nothing is forwarded; at once where it left."""
        if self._client is None:
            callback()
        else:
            self._on_gone = callback

    def forward(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call to its worker and relay the answer; if the client has left, call `watcher.on_gone` at once."""
        if self._client is None:
            watcher.on_gone()
        else:
            assert self.carried is None, "a call is being forwarded"
            self._client.forward(self, call, watcher)

    def end_stream(self, events: bytes) -> None:
        """End the event stream that has begun with these bytes. Do nothing if the client left."""
        client = self._client
        if client is not None:
            assert self.carried is None, "a call is being forwarded"
            self.close()
            client.write(chunk(events) + LAST_CHUNK if client.http_1_1 else events)
            client.finish()

    @property
    def outward(self) -> UpstreamPool:
        """The pool that sends calls to workers; the client must still be there."""
        assert self._client is not None
        return self._client.outward

    def close(self) -> None:
        """The exchange is over: detach its callbacks."""
        self._client = self._on_gone = self.carried = None

    def expire(self, status: int, body: bytes, headers: HeaderLines) -> None:
        """The plane stops while nothing is forwarded: answer the client, and call the `on_gone` callback."""
        callback = self._on_gone
        self.answer(status, body, headers=headers)
        if callback is not None:
            callback()

    def leave(self) -> None:
        """The client left: call the `on_gone` callback."""
        carried, callback = self.carried, self._on_gone
        self.close()
        if carried is not None:
            carried.leave()
        elif callback is not None:
            callback()
