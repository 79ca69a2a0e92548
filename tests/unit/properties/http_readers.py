"""The same bytes read by our side of a connection and by h11, as lists of messages and how it ended."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import h11
import msgspec

from router.http.client import ClientConnection
from router.http.exchange import Exchange
from router.http.heads import UNTIL_CLOSE, AnswerReader, BodyReader, Malformed
from router.http.limits import HttpLimits
from router.http.plane import HttpPlane

POSTS = ("/", "/a", "/v1/completions")
"""Paths of requests that are read without a second look, if nothing about them asks for it."""
DELIBERATE = (
    "bare CR or LF before it",  # h11 forgives bare LF; proxies that disagree on it are smuggled through
    "without control characters",  # h11 forgives bare LF between lines, continuation lines, control characters
    "allowed a token",  # h11 reads a first line behind a bare LF
    "allowed method, target, version",  # the same
    "allowed HTTP/1.1 and HTTP/1.0",  # h11 leaves versions like 1.7 to its caller
    "host: found",  # a name that is not ours: a page of another site may have sent it (DNS rebinding)
    "allowed alone",  # transfer-encoding beside content-length: RFC 9112, 6.3 lets a server refuse it
    "found in HTTP/1.0",  # RFC 9112, 6.1: faulty framing
    "found it twice",  # h11 joins equal lengths, and keeps other names apart
    "content-length: found",  # h11 joins `5, 5`, and takes 20 digits
    "CONNECT is not served",  # we are no tunnel
    "target: found",  # h11 leaves the target to its caller
    "content-encoding: found",  # we do not unpack
    "expect: found",  # RFC 9110, 10.1.1
    "headers: found 1",  # h11 counts bytes, not lines
    "body: found",  # more than we take, which is known from a chunk's length; h11 leaves limits to its caller
    "chunk: found",  # a bare LF in an extension, which h11 does not look into
    "trailer: found",  # the same of trailers; h11 reads those of framing that it would read in a head
    "status line: found",  # the same, and statuses beyond 599
)
"""What our refusals say where h11 may accept, and why."""


class Message(NamedTuple):
    """A message as both read it."""

    start: tuple[Any, ...]
    headers: dict[bytes, bytes]
    body: bytes


class Reading(NamedTuple):
    """Messages that were whole, and why the next is refused; empty where it is not."""

    messages: list[Message]
    refusal: str
    waits: bool = False
    """Whether more of the next message is awaited."""


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.ended = False

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int) -> None:
        """There is always room."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.ended

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.ended = True

    write_eof = abort = close


class StoppedLoop:
    """A loop whose time stands still."""

    def time(self) -> float:
        return 0.0

    def __init__(self) -> None:
        self.calls = list[Callable[[], None]]()

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def turn(self) -> None:
        """Make the calls, and those that they ask for."""
        while self.calls:
            self.calls.pop(0)()


def read_by_us(pieces: Sequence[bytes]) -> Reading:
    """Return the requests in `pieces` as our side of a client's connection reads them."""
    messages: list[Message] = []

    def service(exchange: Exchange) -> None:
        start = (exchange.method, exchange.path, exchange.query)
        messages.append(Message(start, dict(exchange.headers), bytes(exchange.body)))
        exchange.answer(200, b"")

    plane = HttpPlane(service, HttpLimits(), posts=dict.fromkeys(POSTS, service))
    loop = StoppedLoop()
    plane.loop = cast("Any", loop)
    connection, wire = ClientConnection(plane), Wire()
    connection.connection_made(cast("Any", wire))
    for piece in pieces:
        connection.data_received(piece)
        loop.turn()
    refusal = re.search(rb"\r\n\r\n(\{\"error.*)$", wire.written, re.DOTALL)
    said = msgspec.json.decode(refusal[1])["error"]["message"] if refusal else ""
    return Reading([_comparable(each) for each in messages], said, connection.receiving)


def read_by_h11(data: bytes) -> Reading:
    """Return the requests in `data` as h11 reads them; without empty lines before one (RFC 9112, 2.2)."""
    messages: list[Message] = []
    while True:
        while data.startswith(b"\r\n"):
            data = data[2:]
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=64 << 10)
        connection.receive_data(data)
        try:
            found = None if data == b"\r" else _next_by_h11(connection)
        except h11.RemoteProtocolError as error:
            return Reading(messages, str(error))
        if found is None:
            return Reading(messages, "")
        messages.append(_comparable(found))
        if connection.our_state is h11.MUST_CLOSE:
            return Reading(messages, "")
        data = connection.trailing_data[0]


def _next_by_h11(connection: h11.Connection) -> Message | None:
    """Return the next message, once it is whole and answered; None where it is not whole."""
    message = None
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            path, _, query = event.target.decode("ascii").partition("?")
            message = Message((event.method.decode("ascii"), path, query), _joined(event.headers), b"")
        elif isinstance(event, h11.Response):
            message = Message((event.status_code,), _joined(event.headers), b"")
        elif isinstance(event, h11.InformationalResponse):
            return Message((event.status_code,), _joined(event.headers), b"")
        elif isinstance(event, h11.Data):
            assert message is not None
            message = message._replace(body=message.body + bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            if connection.our_role is h11.SERVER:
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
            return message
        else:
            return None


def read_answer_by_us(pieces: Sequence[bytes]) -> Reading:
    """Return the answer to a POST in `pieces`, then their end, as our side of a worker's connection reads it."""
    data = b"".join(pieces)
    end = data.find(b"\r\n\r\n") + 4
    if end == 3:
        return Reading([], "", waits=True)
    try:
        head = AnswerReader(frozenset()).head(data)
        message = Message((head.status,), dict(head.headers), b"")
        if head.body_bytes == 0:
            return Reading([_comparable(message)], "")
        reader, payload = BodyReader(head.body_bytes), bytearray()
        at = 0
        for piece in pieces:
            rest = piece[max(0, end - at) :]
            at += len(piece)
            if rest and reader.feed(rest, payload) >= 0:
                return Reading([_comparable(message._replace(body=bytes(payload)))], "")
        if head.body_bytes == UNTIL_CLOSE:
            return Reading([_comparable(message._replace(body=bytes(payload)))], "")
    except Malformed as error:
        return Reading([], str(error))
    return Reading([], "", waits=True)


def read_answer_by_h11(data: bytes) -> Reading:
    """Return the answer to a POST in `data`, then its end, as h11 reads it."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 << 10)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    try:
        found = _next_by_h11(connection)
    except h11.RemoteProtocolError as error:
        return Reading([], str(error))
    return Reading([] if found is None else [_comparable(found)], "")


def _joined(headers: Any) -> dict[bytes, bytes]:
    joined: dict[bytes, bytes] = {}
    for name, value in headers:
        joined[name] = joined[name] + b", " + value if name in joined else value
    return joined


def _comparable(message: Message) -> Message:
    """Return it with a coding's name in small letters, as h11 gives it."""
    if b"transfer-encoding" not in message.headers:
        return message
    return message._replace(headers={**message.headers, b"transfer-encoding": b"chunked"})
