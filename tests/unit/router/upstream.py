"""A worker's HTTP endpoint that does what a script says, byte for byte, on a port that the system chose."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

_ACCEPT_TURNS = 5
"""Turns of the event loop in which asyncio hands over each connection that the system has accepted."""


class Received(NamedTuple):
    """One request as the worker got it; names of headers in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes
    method: str = "POST"


class Exchange:
    """One request, and what the script does about it."""

    def __init__(self, upstream: "Upstream", streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.reader, self.writer = streams
        self.upstream = upstream
        self.open = True

    @property
    def received(self) -> Received:
        """The request that is being served."""
        return self.upstream.received[-1]

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, status: int = 200, body: bytes = b"{}", content_type: str = "application/json", **headers: str
    ) -> None:
        """Send a whole answer."""
        await self.head(status, content_type, content_length=str(len(body)), **headers)
        await self.send(body)

    async def head(self, status: int = 200, content_type: str = "text/event-stream", **headers: str) -> None:
        """Send an answer's head."""
        named = {"content-type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {value}" for name, value in named.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        """Send one chunk of a chunked answer; an empty one ends it."""
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def cut(self) -> None:
        """Close the connection."""
        self.open = False
        self.writer.close()

    async def until_gone(self) -> None:
        """Wait for the other side to close the connection."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass
        await self.cut()
        self.upstream.gone.set()


Script = Callable[[Exchange], Awaitable[None]]


class Upstream:
    """The endpoint. `received` are its requests, `gone` is set when `until_gone` saw the router go."""

    def __init__(self, script: Script, host: str = "127.0.0.1") -> None:
        self.script = script
        self.received: list[Received] = []
        self.gone = asyncio.Event()
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()
        self._transports: list[asyncio.WriteTransport] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for transport in self._transports:
            transport.abort()  # one with unsent bytes is not closed by `close`
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def kill(self) -> None:
        """Close the port and all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()

    @property
    def base_url(self) -> str:
        """Where it is."""
        return f"http://{self._host}:{self.port}"

    @property
    def port(self) -> int:
        """The port that the system chose."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.append(writer.transport)
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._exchanges(reader, writer)  # until the router is gone, or the test is over

    async def _exchanges(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(self, (reader, writer))
        while exchange.open:
            request_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.received.append(Received(request_line.split(" ")[1], headers, body, request_line.split(" ")[0]))
            await self.script(exchange)


def answers(status: int = 200, body: bytes = b"{}", content_type: str = "application/json", **headers: str) -> Script:
    """Give this answer."""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, body, content_type, **headers)

    return script


def streams(*chunks: bytes) -> Script:
    """Stream these chunks, to the end."""

    async def script(exchange: Exchange) -> None:
        await exchange.head(transfer_encoding="chunked")
        for chunk in (*chunks, b""):
            await exchange.chunk(chunk)

    return script


def says(data: bytes) -> Script:
    """Send these bytes and close the connection."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(data)
        await exchange.cut()

    return script


def says_and_waits(data: bytes) -> Script:
    """Send these bytes, then nothing until the router goes."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(data)
        await exchange.until_gone()

    return script


def pours(head: bytes, data: bytes) -> Script:
    """Send the head, then the data again and again until the router goes."""

    async def script(exchange: Exchange) -> None:
        with suppress(ConnectionError):
            await exchange.send(head)
            while not exchange.writer.is_closing():
                await exchange.send(data)
                await asyncio.sleep(0)
        await exchange.until_gone()

    return script


def completion(text: str = "words", cached_tokens: int | None = 48) -> bytes:
    """Return a whole answer as workers give it."""
    details = {"cached_tokens": cached_tokens}
    usage = {"prompt_tokens": 64, "completion_tokens": 2, "total_tokens": 66, "prompt_tokens_details": details}
    return json.dumps({"object": "text_completion", "choices": [{"text": text}], "usage": usage}).encode()


def event(text: str = "words") -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """Return one chunk as it is on the wire."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
