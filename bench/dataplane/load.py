"""A process of the data plane bench: clients. Connections are kept alive; each has one request at a time.

saturate   so many connections, each sends the next request after each answer, for some seconds
pace       requests at a fixed rate regardless of answers, on any free connection; latencies
hold       so many streams at once, opened over some seconds, each read to its end
crawl      one stream that the client does not read
leave      streams that the client closes after the first bytes; the times of closing

A request controls its answer by OpenAI keys, so that every router forwards them:

    stream       false: one JSON answer with a content length; true: SSE in HTTP chunks
    max_tokens   how many chunks
    seed         milliseconds between two of them; 0: each as soon as the socket takes it, in a separate write

Every prompt begins with a unique number, so that no cache has it.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from bench.child import Answer, Role

MODEL = "bench"
PATH = "/v1/chat/completions"
EVENT = b"data: "
_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_WORDS = "a router sends each request to the worker that holds most of its prefix and has least to do "
_NUMBER = "00000000"
_USAGE = b'"usage":{"prompt_tokens":64,"completion_tokens":8,"total_tokens":72}'


class Requests(NamedTuple):
    """Requests that differ only in their number; the bytes before and after it."""

    before: bytes
    behind: bytes

    def numbered(self, number: int) -> bytes:
        """Return the request with this number."""
        return b"%b%08d%b" % (self.before, number % 100_000_000, self.behind)


def requests(host: str, body_bytes: int, *, chunks: int = 0, pause_ms: int = 0) -> Requests:
    """Return requests with bodies of about so many bytes; `chunks` 0: one JSON answer, not a stream."""
    text = _NUMBER + " " + _WORDS
    options = f'"max_tokens":{max(1, chunks)},"seed":{pause_ms},"stream":{"true" if chunks else "false"}'
    begin = f'{{"model":"{MODEL}",{options},"messages":[{{"role":"user","content":"'
    prompt_bytes = max(len(text), body_bytes - len(begin) - len('"}]}'))
    body = begin + (text * (prompt_bytes // len(text) + 1))[:prompt_bytes] + '"}]}'
    at = body.index(_NUMBER)
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return Requests((head + body[:at]).encode(), body[at + len(_NUMBER) :].encode())


def content_length(head: bytes) -> int | None:
    """Return the length that a head in lower case names."""
    _, found, behind = head.partition(b"content-length:")
    return int(behind.split(b"\r\n", 1)[0]) if found else None


def json_answer(body: bytes) -> bytes:
    """Return a complete JSON answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


JSON_ANSWER = json_answer(
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"the worker that holds most of it"},"finish_reason":"stop"}],' + _USAGE + b"}"
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNK = _chunk(
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,'
    b'"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
STREAM_END = (
    _chunk(
        b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"bench","choices":[],'
        + _USAGE
        + b"}\n\n"
    )
    + _chunk(b"data: [DONE]\n\n")
    + _LAST_CHUNK
)
END_EVENTS = 2
"""Events after the chunks of a stream: its usage and `[DONE]`."""


class AnswerInvalid(Exception):
    """Bytes that are not a readable answer."""


class AnswerReader:
    """One answer, read from bytes as they arrive: its status, its events, and whether it is complete."""

    __slots__ = ("_buffer", "_left", "_tail", "events", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self._left: int | None = None
        self._tail = b""
        self.status = 0
        self.events = 0

    def feed(self, data: bytes) -> bool:
        """Return whether the answer is complete; raise `AnswerInvalid` where its end cannot be known."""
        if not self.status:
            self._buffer += data
            head, found, data = self._buffer.partition(_END)
            if not found:
                return False
            self._begin(head.lower())
        if self._left is not None:
            self._left -= len(data)
            return self._left <= 0
        seen = self._tail + data
        self.events += seen.count(EVENT)
        self._tail = seen[-(len(EVENT) - 1) :]
        return seen.endswith(_LAST_CHUNK)

    def _begin(self, head: bytes) -> None:
        self.status = int(head[9:12])
        self._buffer = b""
        if b"transfer-encoding: chunked" in head:
            return
        self._left = content_length(head)
        if self._left is None:
            raise AnswerInvalid("an answer without a length")


_OK = 200
_BETWEEN_LEAVES_S = 0.03
_OVERTIME_S = 20.0
"""Extra time after the planned end; an answer that is not complete by then has failed."""


class LoadConnection(asyncio.Protocol):
    """A client's connection; `on_complete(connection, is_ok)` is called at the end or loss of each answer."""

    def __init__(self, on_complete: Callable[["LoadConnection", bool], None]) -> None:
        self._on_complete = on_complete
        self._reader: AnswerReader | None = None
        self._first = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self.sent_s = 0.0
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass

    def send(self, request: bytes) -> None:
        """Send a request; the previous one must be answered."""
        self._reader = AnswerReader()
        self.sent_s = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Read the answer and count its events."""
        if not self._first.done():
            self._first.set_result(None)
        reader = self._reader
        if reader is None:
            return
        try:
            is_complete = reader.feed(data)
        except AnswerInvalid:
            self.transport.abort()
            return
        if is_complete:
            self._reader = None
            self.events += reader.events
            self._on_complete(self, reader.status == _OK)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a pending answer as failed."""
        del exc
        if not self._first.done():
            self._first.set_result(None)
        if self._reader is not None:
            self.events += self._reader.events
            self._reader = None
            self._on_complete(self, False)  # noqa: FBT003 - as below

    async def first_bytes(self) -> None:
        """Wait for the first bytes or the loss of the connection."""
        await self._first


class LoadRole(Role):
    """The clients of the bench; the module lists their commands."""

    def __init__(self) -> None:
        self._number = 0

    def _next(self, template: Requests) -> bytes:
        self._number += 1
        return template.numbered(self._number)

    async def saturate(
        self, port: int, body_bytes: int, connections: int, seconds: float, chunks: int = 0, pause_ms: int = 0
    ) -> Answer:
        """Return how many requests were answered, and how many failed."""
        template = requests(f"127.0.0.1:{port}", body_bytes, chunks=chunks, pause_ms=pause_ms)
        done = errors = 0
        ends_s = time.perf_counter() + seconds
        idle = asyncio.Event()
        running = connections

        def on_complete(connection: LoadConnection, is_ok: bool) -> None:  # noqa: FBT001 - as the connection calls it
            nonlocal done, errors, running
            done, errors = done + is_ok, errors + (not is_ok)
            if time.perf_counter() < ends_s and not connection.transport.is_closing():
                connection.send(self._next(template))
                return
            running -= 1
            if not running:
                idle.set()

        opened = [await _open(port, on_complete) for _ in range(connections)]
        began_s = time.perf_counter()
        for connection in opened:
            connection.send(self._next(template))
        await _within(idle, seconds + _OVERTIME_S)
        took_s = time.perf_counter() - began_s
        events = sum(connection.events for connection in opened)
        _close(opened)
        return {"requests": done, "errors": errors + running, "events": events, "seconds": took_s}

    async def pace(self, port: int, body_bytes: int, rate: float, seconds: float) -> Answer:
        """Return the latencies, and how many requests failed."""
        template = requests(f"127.0.0.1:{port}", body_bytes)
        latencies_us: list[float] = []
        errors = 0
        free: list[LoadConnection] = []
        opened: list[LoadConnection] = []
        left = total = round(rate * seconds)
        idle = asyncio.Event()

        def on_complete(connection: LoadConnection, is_ok: bool) -> None:  # noqa: FBT001 - as the connection calls it
            nonlocal errors, left
            left -= 1
            if is_ok:
                latencies_us.append(1e6 * (time.perf_counter() - connection.sent_s))
            errors += not is_ok
            if not connection.transport.is_closing():
                free.append(connection)
            if not left:
                idle.set()

        began_s = time.perf_counter()
        for number in range(total):
            await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
            if not free:
                free.append(await _open(port, on_complete))
                opened.append(free[-1])
            free.pop().send(self._next(template))
        await _within(idle, _OVERTIME_S)
        took_s = time.perf_counter() - began_s
        _close(opened)
        return {"latencies_us": latencies_us, "errors": errors + left, "seconds": took_s}

    async def hold(self, port: int, streams: int, chunks: int, pause_ms: int, ramp_s: float) -> Answer:
        """Return how many streams were open at once, how many failed, and the events that did not come."""
        template = requests(f"127.0.0.1:{port}", 300, chunks=chunks, pause_ms=pause_ms)
        errors, left = 0, streams
        idle = asyncio.Event()

        def on_complete(_connection: LoadConnection, is_ok: bool) -> None:  # noqa: FBT001 - as the connection calls it
            nonlocal errors, left
            errors += not is_ok
            left -= 1
            if not left:
                idle.set()

        began_s = time.perf_counter()
        opened: list[LoadConnection] = []
        for number in range(streams):
            await asyncio.sleep(max(0.0, began_s + number * ramp_s / streams - time.perf_counter()))
            try:
                connection = await _open(port, on_complete)
            except OSError:
                errors, left = errors + 1, left - 1
                continue
            opened.append(connection)
            connection.send(self._next(template))
        at_once = left
        if left:
            await _within(idle, chunks * pause_ms / 1000 + _OVERTIME_S)
        events = sum(connection.events for connection in opened)
        _close(opened)
        missing = streams * (chunks + END_EVENTS) - events
        return {"errors": errors + left, "events": events, "missing": missing, "at_once": at_once}

    async def crawl(self, port: int, seconds: float) -> Answer:
        """Return after so many seconds."""
        template = requests(f"127.0.0.1:{port}", 300, chunks=100_000_000)
        connection = await _open(port, lambda _connection, _is_ok: None)
        connection.send(self._next(template))
        await connection.first_bytes()
        connection.transport.pause_reading()
        await asyncio.sleep(seconds)
        connection.transport.abort()
        return {}

    async def leave(self, port: int, times: int, pause_ms: int) -> Answer:
        """Return when streams were closed."""
        template = requests(f"127.0.0.1:{port}", 300, chunks=1_000_000, pause_ms=pause_ms)
        left_ns = []
        for _ in range(times):
            connection = await _open(port, lambda _connection, _is_ok: None)
            connection.send(self._next(template))
            await connection.first_bytes()
            await asyncio.sleep(_BETWEEN_LEAVES_S)
            left_ns.append(time.time_ns())
            connection.transport.close()
            await asyncio.sleep(_BETWEEN_LEAVES_S)
        await asyncio.sleep(2 * pause_ms / 1000)
        return {"left_ns": left_ns}


async def _open(port: int, on_complete: Callable[[LoadConnection, bool], None]) -> LoadConnection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: LoadConnection(on_complete), "127.0.0.1", port)
    return connection


def _close(opened: list[LoadConnection]) -> None:
    for connection in opened:
        connection.transport.abort()


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
