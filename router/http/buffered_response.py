"""Collects a worker's answer that is not passed on, or reads and drops it until its first byte.

`BufferedResponse` stands where a client's connection stands, between a worker's answer and the handler of the call.
It serves calls without a client, and calls that their client has left.
"""

from typing import TYPE_CHECKING

from router.http.exchange import Exchange, HeaderLines, OutboundCall, ResponseHandler

if TYPE_CHECKING:
    from router.http.upstreams import Upstreams

ASIDE_BYTES_MAX = 4 << 20
"""Of a prefill worker's answer: its handoff may have a megabyte of state, in base64."""
_HEAD_END = b"\r\n\r\n"


class BufferedResponse:
    """A `ClientEnd` that keeps `ASIDE_BYTES_MAX` of an answer at most, head included; a longer answer is given up."""

    __slots__ = ("_exchange", "_size", "_written", "outward")

    http_1_1 = writing_paused = False
    """Bodies arrive decoded, not in chunks."""

    def __init__(self, outward: "Upstreams") -> None:
        self.outward = outward
        self._exchange: Exchange | None = None
        self._written: list[bytes] = []
        self._size = 0

    def ask(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send the call to its worker. `watcher` gets its events, and may read `body` when the answer has ended."""
        exchange = self._exchange = Exchange(self, "POST", call.path, "", {}, b"", 0.0)
        self._written.clear()
        self._size = 0
        exchange.forward(call, watcher)

    def give_up(self) -> None:
        """Close the worker's connection, if there is one: the answer is not wanted any more."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
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
        else:
            self.give_up()

    def finish(self) -> None:
        """The answer is over; if it is cut, the handler of the call knows it already."""
        self._exchange = None

    cut = finish

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Ignore an answer of the router itself: the handler of the call knows the reason already."""
