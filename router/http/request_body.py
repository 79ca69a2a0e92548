"""A request's body that did not come in one piece with its head: it is gathered, counted, and timed."""

from typing import TYPE_CHECKING

from kv_protocol.body_limits import SCANNED_BYTES, Bytes
from router.http.exchange import Exchange
from router.http.heads import BodyReader, Malformed

if TYPE_CHECKING:
    from router.http.plane import HttpPlane


class GatheredBody:
    """A body that is awaited. Its bytes count in `plane`'s total of all bodies until `release`."""

    __slots__ = ("_began_s", "_body", "_counted", "_grew_s", "_plane", "_reader", "_seen", "exchange")

    def __init__(self, body_bytes: int, exchange: Exchange, plane: "HttpPlane") -> None:
        """`exchange` is to get the body; `body_bytes` is its length, or `CHUNKED`."""
        self.exchange, self._plane = exchange, plane
        self._body = bytearray()
        self._reader = BodyReader(body_bytes)
        self._counted = 0
        self._began_s = self._grew_s = 0.0
        """When the body began, and last grew, by the loop's clock; 0 until the first timeout check."""
        self._seen = 0

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return where in `data` the body ends, -1 if it does not end.

        Raises:
            Malformed: it is too long, is no chunked body, or there is no room for it now.
        """
        reader, body, limits = self._reader, self._body, self._plane.limits
        end = reader.feed(data, body)
        if (found := len(body) + reader.left) > limits.body_bytes_max:
            raise Malformed(413, f"body: found {found} bytes and more, allowed {limits.body_bytes_max}")
        more, self._counted = len(body) - self._counted, len(body)
        self._plane.bodies_bytes += more
        if more and self._plane.bodies_bytes > (allowed := limits.bodies_bytes_max):
            raise Malformed(503, f"data.bodies_bytes_max: the bodies of all requests have {allowed} bytes; try again")
        return end

    def take(self) -> Bytes:
        """Return the complete body, and keep only its count; a long body is not copied."""
        body, self._body = self._body, bytearray()
        return body if len(body) > SCANNED_BYTES else bytes(body)

    def release(self) -> None:
        """Take the body's bytes out of the total of all bodies."""
        self._plane.bodies_bytes -= self._counted
        self._counted = 0

    def too_slow(self, now_s: float) -> str:
        """Return which limit the client exceeds by being too slow; empty if none."""
        limits, found = self._plane.limits, len(self._body)
        if not self._began_s or found != self._seen:
            self._began_s = self._began_s or now_s
            self._grew_s, self._seen = now_s, found
        took_s, rate = now_s - self._began_s, limits.body_rate_min_bytes_s
        if took_s > limits.body_total_s:
            return f"body: not whole within {limits.body_total_s:g} s"
        if now_s - self._grew_s > limits.body_s:
            return f"body: no byte for {limits.body_s:g} s"
        if found < (took_s - limits.body_s) * rate:
            return f"body: found {found} bytes within {took_s:.0f} s, allowed {rate:g} a second and more"
        return ""
