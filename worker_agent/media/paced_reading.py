"""Reads a media server's answer within bounds, and lets the event loop serve others between two reads.

interim answers (1xx)    at most `INTERIM_MAX`
bytes on the wire        at most `CODING_FACTOR` for each allowed byte of the body: chunked coding adds some
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
        self._turns, self._interim_left = loop, INTERIM_MAX
        self._bytes_left = _HEAD_BYTES_MAX + CODING_FACTOR * bytes_max

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
    made = connector._factory  # noqa: SLF001 - the library has no other place for it
    connector._factory = partial(_PacedAnswer, bytes_max=bytes_max, **made.keywords)  # type: ignore[assignment]  # noqa: SLF001
