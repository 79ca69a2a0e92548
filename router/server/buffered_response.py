"""A worker's answer that is not passed on: collected whole, or read and dropped until its first byte.

`BufferedResponse` takes the place of a client's connection, between a worker's answer and the handler of the call.
There need be no client, or it may have left.
"""

import asyncio

from router.server.exchange import Exchange, HeaderLines, OutboundCall, ResponseHandler, UpstreamPool
from router.server.heads import RequestHead

_HEAD_END = b"\r\n\r\n"


class BufferedResponse:
    """At most `bytes_max` bytes of an answer, head included: of more, the call is given up. A `ClientEnd`."""

    __slots__ = ("_bytes_max", "_exchange", "_outward", "_size", "_written", "http_1_1")

    def __init__(self, outward: UpstreamPool, bytes_max: int) -> None:
        self._outward, self._bytes_max = outward, bytes_max
        self.http_1_1 = False
        """Bodies come as they are, not in chunks."""
        self._exchange: Exchange | None = None
        self._written: list[bytes] = []
        self._size = 0

    def ask(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call; `watcher` hears of it, and may read `body` when its answer has ended."""
        exchange = self._exchange = Exchange(
            self, RequestHead("POST", call.path, "", {}, 0, keep_alive=False, http_1_1=False), b"", 0.0
        )
        self._written.clear()
        self._size = 0
        exchange.forward(call, watcher)

    def another(self) -> "BufferedResponse":
        """Return a place for another answer."""
        return BufferedResponse(self._outward, self._bytes_max)

    def give_up(self) -> None:
        """Nobody waits for the answer any more: the worker's connection is closed, if there is one."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()

    @property
    def body(self) -> bytes:
        """What came of the answer's body."""
        return b"".join(self._written).partition(_HEAD_END)[2]

    # ------------------------------------------------------------ as a client's connection

    @property
    def connection_line(self) -> bytes:
        """Nothing: there is no connection."""
        return b""

    @property
    def peer(self) -> str:
        """Nobody."""
        return ""

    @property
    def outward(self) -> UpstreamPool:
        """Who sends the call."""
        return self._outward

    def forward(self, exchange: Exchange, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call and gather its answer."""
        self._outward.forward(exchange, self, call, watcher, asyncio.get_running_loop().time())

    def write(self, data: bytes) -> None:
        """Keep bytes of the answer."""
        self._size += len(data)
        if self._size <= self._bytes_max:
            self._written.append(data)
        else:
            self.give_up()

    def finish(self) -> None:
        """The answer is whole."""
        self._exchange = None

    def cut(self) -> None:
        """It will not be whole; whoever follows the call was told."""
        self._exchange = None

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Take no answer of our own: whoever follows the call was told why there is none."""
