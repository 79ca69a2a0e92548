"""Servers that speak bytes, right or wrong, and know when their client has gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


class Speaker:
    """A server that speaks bytes, and knows when its client has gone."""

    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self.gone = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await self._speak(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()
            self.gone.set()


@asynccontextmanager
async def speaking(speak: Speak) -> AsyncIterator[Speaker]:
    speaker = Speaker(speak)
    async with await asyncio.start_server(speaker.serve, "127.0.0.1", 0) as listening:
        speaker.port = listening.sockets[0].getsockname()[1]
        yield speaker


def says(*texts: bytes, then_waits: bool = False) -> Speak:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for text in texts:
            writer.write(text)
            await writer.drain()
        if then_waits:
            await reader.read()  # until the client goes

    return speak


async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Chunks, until the client goes."""
    writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"1000\r\n" + bytes(4096) + b"\r\n")
        await writer.drain()
