"""A process of the data plane bench: clients. Connections are kept alive; each has one request at a time.

saturate   some connections; each sends its next request after each answer, for some seconds
pace       requests at a fixed rate regardless of answers, on any free connection; returns latencies
hold       many streams at once, opened over some seconds, each read to its end
crawl      one stream that the client does not read
leave      streams that the client closes after the first bytes; returns when it closed each

A request controls its answer by OpenAI keys, so that every router forwards them:

    stream       false: one JSON answer with a content length; true: SSE in HTTP chunks
    max_tokens   how many chunks
    seed         milliseconds between two chunks; 0: each as soon as the socket takes it, in a separate write

Every prompt begins with a unique number, so that no cache has it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, cast

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
    """Requests that differ only in their number: the bytes before and after the number."""

    before: bytes
    behind: bytes

    def numbered(self, number: int) -> bytes:
        """Return the request with this number."""
        return b"%b%08d%b" % (self.before, number % 100_000_000, self.behind)


def requests(host: str, body_bytes: int, *, chunks: int = 0, pause_ms: int = 0) -> Requests:
    """Return requests with bodies of about `body_bytes`; `chunks` 0: one JSON answer, not a stream."""
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
    """Return the `content-length` in a head in lower case; None if it has none."""
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
        """Read `data`; return whether the answer is complete. Raise `ValueError` if its end cannot be known."""
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
            raise ValueError("an answer without a length")


_OK = 200
_BETWEEN_LEAVES_S = 0.03
_OVERTIME_S = 20.0
"""Extra time after the planned end; an answer that is not complete by then has failed."""


class LoadConnection(asyncio.Protocol):
    """A client's connection, with one request at a time."""

    def __init__(self) -> None:
        self._reader: AnswerReader | None = None
        self._answered = asyncio.get_running_loop().create_future()
        self.first = asyncio.get_running_loop().create_future()
        """Done once the first bytes came, or the connection is lost."""
        self.transport: asyncio.Transport
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass

    def send(self, request: bytes) -> "asyncio.Future[bool]":
        """Send a request; the one before must be answered. The result: whether a whole answer of status 200 came."""
        self._reader, self._answered = AnswerReader(), asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        """Read the answer and count its events."""
        if not self.first.done():
            self.first.set_result(None)
        reader = self._reader
        if reader is None:
            return
        try:
            if reader.feed(data):
                self._end(is_ok=reader.status == _OK)
        except ValueError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a pending answer as failed."""
        del exc
        if not self.first.done():
            self.first.set_result(None)
        self._end(is_ok=False)

    def _end(self, *, is_ok: bool) -> None:
        if self._reader is not None:
            self.events += self._reader.events
            self._reader = None
            if not self._answered.done():
                self._answered.set_result(is_ok)


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
        opened = [await _open(port) for _ in range(connections)]
        began_s, outcomes = time.perf_counter(), Counter[bool]()

        async def client(connection: LoadConnection) -> None:
            while time.perf_counter() < began_s + seconds and not connection.transport.is_closing():
                outcomes[await connection.send(self._next(template))] += 1

        hung = await _within(map(client, opened), seconds + _OVERTIME_S)
        took_s = time.perf_counter() - began_s
        events = sum(connection.events for connection in opened)
        _close(opened)
        return {"requests": outcomes[True], "errors": outcomes[False] + hung, "events": events, "seconds": took_s}

    async def pace(self, port: int, body_bytes: int, rate: float, seconds: float) -> Answer:
        """Return the latencies, and how many requests failed."""
        template = requests(f"127.0.0.1:{port}", body_bytes)
        latencies_us, free, opened = list[float](), list[LoadConnection](), list[LoadConnection]()

        async def client(connection: LoadConnection) -> None:
            sent_s = time.perf_counter()
            if await connection.send(self._next(template)):
                latencies_us.append(1e6 * (time.perf_counter() - sent_s))
            if not connection.transport.is_closing():
                free.append(connection)

        began_s, total, clients = time.perf_counter(), round(rate * seconds), list[asyncio.Task[None]]()
        for number in range(total):
            await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
            if not free:
                free.append(await _open(port))
                opened.append(free[-1])
            clients.append(asyncio.create_task(client(free.pop())))
        await _within(clients, _OVERTIME_S)
        took_s = time.perf_counter() - began_s
        _close(opened)
        return {"latencies_us": latencies_us, "errors": total - len(latencies_us), "seconds": took_s}

    async def hold(self, port: int, streams: int, chunks: int, pause_ms: int, ramp_s: float) -> Answer:
        """Return how many streams were open at once, how many failed, and how many events did not come."""
        template = requests(f"127.0.0.1:{port}", 300, chunks=chunks, pause_ms=pause_ms)
        began_s, opened, answered = time.perf_counter(), list[LoadConnection](), list[asyncio.Future[bool]]()
        for number in range(streams):
            await asyncio.sleep(max(0.0, began_s + number * ramp_s / streams - time.perf_counter()))
            with suppress(OSError):
                opened.append(await _open(port))
                answered.append(opened[-1].send(self._next(template)))
        at_once = sum(not each.done() for each in answered)
        await _within(answered, chunks * pause_ms / 1000 + _OVERTIME_S)
        well = sum(each.done() and not each.cancelled() and each.result() for each in answered)
        events = sum(connection.events for connection in opened)
        _close(opened)
        missing = streams * (chunks + END_EVENTS) - events
        return {"errors": streams - well, "events": events, "missing": missing, "at_once": at_once}

    async def crawl(self, port: int, seconds: float) -> Answer:
        """Open a stream and do not read it for `seconds`."""
        template = requests(f"127.0.0.1:{port}", 300, chunks=100_000_000)
        connection = await _open(port)
        connection.send(self._next(template))
        await connection.first
        connection.transport.pause_reading()
        await asyncio.sleep(seconds)
        connection.transport.abort()
        return {}

    async def leave(self, port: int, times: int, pause_ms: int) -> Answer:
        """Close each stream soon after its first bytes; return pause and time in ns of each. Pauses differ by 1 ms."""
        left = list[tuple[int, int]]()
        for pause in range(pause_ms, pause_ms + times):
            connection = await _open(port)
            connection.send(self._next(requests(f"127.0.0.1:{port}", 300, chunks=1_000_000, pause_ms=pause)))
            await connection.first
            await asyncio.sleep(_BETWEEN_LEAVES_S)
            left.append((pause, time.time_ns()))
            connection.transport.close()
            await asyncio.sleep(_BETWEEN_LEAVES_S)
        await asyncio.sleep(2 * pause_ms / 1000)
        return {"left": left}


async def _open(port: int) -> LoadConnection:
    _, connection = await asyncio.get_running_loop().create_connection(LoadConnection, "127.0.0.1", port)
    return connection


def _close(opened: list[LoadConnection]) -> None:
    for connection in opened:
        connection.transport.abort()


async def _within(work: Iterable[Awaitable[Any]], seconds: float) -> int:
    """Wait for all the work; return how much of it was not done in time, and was cancelled."""
    if not (begun := [asyncio.ensure_future(each) for each in work]):
        return 0
    _, hung = await asyncio.wait(begun, timeout=seconds)
    for each in hung:
        each.cancel()
    return len(hung)
