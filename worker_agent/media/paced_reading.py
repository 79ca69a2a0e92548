"""Reads a server's answer so that it cannot keep the event loop busy, and within bounds.

interim answers     at most `INTERIM_MAX` (1xx) come before the answer
the whole answer    has at most `CODING_FACTOR` bytes for each allowed one of its body: chunked coding takes some
after each read     the loop serves others before the next one: a parser takes long for many small parts
"""

import asyncio
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

INTERIM_MAX = 16
CODING_FACTOR = 8
_HEAD_BYTES_MAX = 64 << 10
_INTERIM = range(100, 200)


class _PacedAnswer(ResponseHandler):
    """The protocol of one answer, whose body has at most `bytes_max` bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        super().__init__(loop)
        self._turns, self._bytes_left, self._interim_left = (
            loop,
            _HEAD_BYTES_MAX + CODING_FACTOR * bytes_max,
            INTERIM_MAX,
        )

    def data_received(self, data: bytes) -> None:
        """Take bytes, unless there are too many; then let the loop turn once."""
        transport = self.transport
        self._bytes_left -= len(data)
        if transport is not None and (self._bytes_left < 0 or self._interim_left < 0):
            transport.abort()
            return
        super().data_received(data)
        if transport is not None and not transport.is_closing() and transport.is_reading():
            transport.pause_reading()
            self._turns.call_soon(_resume, transport)

    def feed_data(self, data: Any, size: int = 0) -> None:  # noqa: ANN401 - as the base class has it
        """Take an answer of the server, unless it is one more interim one."""
        self._interim_left -= data[0].code in _INTERIM
        if self._interim_left >= 0:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.abort()


def _resume(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


def pace(connector: aiohttp.TCPConnector, bytes_max: int) -> None:
    """Have the connector read its answers so; raise `AttributeError` if the library makes its protocols otherwise."""
    factory = partial(_PacedAnswer, asyncio.get_running_loop(), bytes_max)
    assert callable(connector._factory)  # noqa: SLF001 - the library has no other place for it
    connector._factory = factory  # type: ignore[assignment]  # noqa: SLF001
