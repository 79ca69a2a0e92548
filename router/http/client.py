"""One connection of a client: reads requests, writes answers.

    head --head read--> body --all of it--> serving --answered--> head ...
                                            serving --answered, and it is to end--> lingering --> closed
    refused heads and bodies: answered, then lingering

| the client | what happens |
|---|---|
| has no API key of an account (`accounts.py`), where those are asked for | 401 |
| calls us by a name that is not ours, or is a foreign page's browser | 421, 403 (`sites.py`) |
| sends the next request before it has its answer | it is kept, within a bound, and served in its turn |
| expects `100-continue` | it gets `100 Continue`, or the refusal |
| is slower than `head_s`, `body_s`, `body_total_s`, `body_rate_min_bytes_s` | 408 |
| reads nothing for `write_s` | cut off |
| resets its connection while it is served | it has left |
| closes, or half-closes, while it is served | serving goes on; probes are sent that change no answer: `100 Continue` |
| | before its head, a comment between events. A closed client's system answers with a reset: it has left |
| is refused early | its bytes are read and ignored for `linger_s`, so that it can read the answer |
"""

import asyncio
import socket
from time import perf_counter
from typing import TYPE_CHECKING, cast

import structlog

from kv_runtime.http.answers import error_body
from router.http.exchange import CONTINUE, Exchange, HeaderLines, own_answer
from router.http.heads import Malformed, RequestHead, request_head
from router.http.request_body import GatheredBody

if TYPE_CHECKING:
    from router.http.accounts import Account
    from router.http.plane import HttpPlane

_TURN_BYTES = 64 << 10
"""Bytes read at once. Beyond them other connections get their turn before more of a body is read."""
_RESET_CHECK_S, _RESET_CHECK_S_MAX = 0.00025, 0.25
"""Seconds from a probe to the first check for a reset; each check is four times as late. Later, the sweep checks."""
_CLOSE = b"connection: close\r\n"
_IDLE, _HEAD, _BODY, _SERVING, _LINGERING, _CLOSED = range(6)
_KINDS = {401: "authentication_error", 503: "server_error"}
_MORE = {401: ((b"www-authenticate", b"Bearer"),), 503: ((b"retry-after", b"1"),)}
_CODES = {
    401: "invalid_api_key",
    403: "foreign_origin",
    408: "timeout",
    413: "body_too_large",
    421: "unknown_host",
    431: "head_too_large",
}

_log = structlog.get_logger("http")


class ClientConnection:
    """One client connection, registered with `plane` while open. An `asyncio.Protocol` by shape, not by class."""

    __slots__ = (
        "_account", "_began_s", "_exchange", "_gathered", "_has_served", "_keep_alive", "_pending_bytes",
        "_plane", "_since_s", "_slot", "_state", "_transport", "buffer", "connection_line", "forward", "half_closed",
        "http_1_1", "outward", "reading_paused", "write", "writing_paused",
    )  # fmt: skip

    def __init__(self, plane: "HttpPlane") -> None:
        self._plane, self.outward, self.forward = plane, plane.upstreams, plane.upstreams.forward
        self._state = _IDLE
        self.buffer = self.connection_line = b""
        self._gathered: GatheredBody | None = None
        """The body that is awaited or, once it is complete, counted until its request is answered."""
        self._exchange: Exchange | None = None
        self._account: Account | None = None
        """Of the request that is read or served; None: no keys are asked for."""
        self._keep_alive = self.http_1_1 = True
        self.writing_paused = self.reading_paused = self.half_closed = self._has_served = False
        self._pending_bytes = 0

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        self._since_s = 0.0
        """Since when the state is unchanged or no byte came; 0 until the first timeout check: the clock is not read."""
        self._transport.set_write_buffer_limits(high=self._plane.limits.write_bytes_max)
        self._slot, full = self._plane.opened(self)
        if full:
            self._refuse(503, full)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it went does not matter
        """The connection is closed: the client is gone."""
        self._slot.discard(self)
        self._let_go_of_body()
        self._plane.closed(self)
        self._leave()

    def eof_received(self) -> bool:
        """The client sends no more. Return whether it may still get answers."""
        state = self._state
        is_waiting = state == _SERVING or (state <= _HEAD and self.writing_paused)
        if not (is_waiting and self._transport.can_write_eof()):
            self._leave()
            return False
        self.half_closed = True
        if not self.buffer:
            self.end_with_answer()
        if self._exchange is not None and (probe := self._exchange.probe):
            self._transport.write(probe)
            self._plane.loop.call_later(_RESET_CHECK_S, self._check_reset, _RESET_CHECK_S)
        return True

    def _check_reset(self, waited_s: float) -> None:
        """Leave if the probe was answered by a reset: from a half-closed connection nothing is read that would tell."""
        if self._state != _SERVING:
            return
        if self._is_reset():
            self._leave()
        elif waited_s < _RESET_CHECK_S_MAX:
            self._plane.loop.call_later(3 * waited_s, self._check_reset, 4 * waited_s)

    def _leave(self) -> None:
        state, self._state = self._state, _CLOSED
        self.buffer = b""
        exchange, self._exchange = self._exchange, None
        if state == _SERVING and exchange is not None:
            self._transport.abort()
            self._plane.inflight -= 1
            self._plane.gone += 1
            exchange.leave()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.writing_paused = True
        self._since_s, self._pending_bytes = 0.0, self._transport.get_write_buffer_size()
        if self._exchange is not None and self._exchange.relay is not None:
            self._exchange.relay.pause()

    def resume_writing(self) -> None:
        """The client has read most of the pending bytes."""
        self.writing_paused = False
        if self._exchange is not None:
            if self._exchange.relay is not None:
                self._exchange.relay.resume()
        else:
            self._go_on()

    # ------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client, and serve complete requests one after the other."""
        state = self._state
        if state == _BODY:
            assert self._gathered is not None, "there is one while a body is awaited"
            self._feed_body(self._gathered, data)
            if len(data) >= _TURN_BYTES:
                self._end_turn()
        elif state <= _HEAD and not self.writing_paused:
            self.buffer = self.buffer + data if self.buffer else data
            try:
                while self.buffer and self._state <= _HEAD and not self.writing_paused:
                    if self._state == _IDLE:
                        self._state, self._began_s, self._since_s = _HEAD, perf_counter(), 0.0
                    head = request_head(self.buffer)
                    if head is None:
                        break
                    self._take(head)
            except Malformed as error:
                self._refuse(error.status, str(error))
            if self.half_closed and self._state <= _HEAD and not self.writing_paused:
                self._send_away(request_consumed=True)
        elif state <= _SERVING:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self.buffer += data
        if len(self.buffer) > self._plane.limits.pipelined_bytes_max and not self.reading_paused:
            self.reading_paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Serve the requests that came while there was another one, or while the client read too slowly."""
        if self._state <= _HEAD:
            self.data_received(b"")
        if self.reading_paused and len(self.buffer) <= self._plane.limits.pipelined_bytes_max:
            self.reading_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _end_turn(self) -> None:
        """Read on in the loop's next turn: libuv reads up to 32 times in a row while more is there, 8 MB of a body."""
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._plane.loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        if not self.reading_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _take(self, head: RequestHead) -> None:
        """Check the head that the buffer begins with; serve its request, or await the rest of its body."""
        plane, headers = self._plane, head.headers
        sites = plane.sites
        is_plain = headers.get(b"host") in sites.served_hosts and b"origin" not in headers  # most requests
        self.connection_line = sites.lines if is_plain else sites.checked(headers)
        if plane.credentials.accounts is not None:
            self._account = plane.account(head)
        if head.body_bytes > plane.limits.body_bytes_max:
            raise Malformed(413, f"body: found {head.body_bytes} bytes, allowed {plane.limits.body_bytes_max}")
        if head.body is None:
            self._await_body(head)
        else:
            self._serve(head, head.body, head.rest)

    def _serve(self, head: RequestHead, body: bytes | bytearray, rest: bytes) -> None:
        """Serve a request that was checked; `rest` follows it."""
        plane = self._plane
        method, path, query, headers, _, keep_alive, self.http_1_1, _, _ = head
        self._keep_alive = keep_alive and not (plane.draining or (self.half_closed and not rest))
        if not self._keep_alive:
            self.connection_line += _CLOSE
        exchange = self._exchange = Exchange(self, method, path, query, headers, body, self._began_s, self._account)
        self.buffer, self._state = rest, _SERVING
        plane.inflight += 1
        try:
            if method == "OPTIONS" or plane.is_over:
                plane.answer_or_serve(exchange)
            else:
                plane.service(exchange)
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            _log.exception("request_failed", path=path)
            if exchange.relay is not None or exchange.client is None:
                self._transport.abort()
            else:
                message = f"our fault: {type(error).__name__}; see the log"
                exchange.answer(500, error_body(message, "server_error"))

    def _await_body(self, head: RequestHead) -> None:
        gathered = self._gathered = GatheredBody(head._replace(rest=b""), self._plane)
        self.buffer, self._state, self._since_s = b"", _BODY, 0.0
        if head.rest:
            self._feed_body(gathered, head.rest)
        elif b"expect" in head.headers and head.http_1_1:
            self.write(CONTINUE)

    def _feed_body(self, gathered: GatheredBody, data: bytes) -> None:
        try:
            end = gathered.feed(data)
            if end >= 0:
                self._serve(gathered.head, gathered.take(), data[end:])
        except Malformed as error:
            self._refuse(error.status, str(error))

    def _let_go_of_body(self) -> None:
        if self._gathered is not None:
            self._gathered.release()
            self._gathered = None

    # ------------------------------------------------------------ answers

    @property
    def unsent_bytes(self) -> int:
        """What the client has not taken of its answers; without what its system and ours hold."""
        return self._transport.get_write_buffer_size()

    @property
    def receiving(self) -> bool:
        """Whether a request's head or body has begun and is not complete."""
        return self._state in {_HEAD, _BODY}

    def end_with_answer(self) -> None:
        """The connection ends with the answer in progress, which says so if its head was not sent."""
        exchange = self._exchange
        if exchange is not None and self._keep_alive and (self.half_closed or not exchange.has_begun):
            self._keep_alive = False
            self.connection_line += _CLOSE

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Send a complete answer of the router."""
        exchange = self._exchange
        out = own_answer(status, body, content_type, headers, self.connection_line)
        self._transport.write(out[: -len(body)] if body and exchange is not None and exchange.method == "HEAD" else out)
        self.finish()

    def finish(self) -> None:
        """The answer is complete: the next request may come, or the connection ends."""
        self._exchange = None
        self._plane.inflight -= 1
        if self._gathered is not None:
            self._let_go_of_body()
        if not self._keep_alive:
            self._send_away(request_consumed=not self.buffer)
            return
        self._state, self._has_served, self._since_s = _IDLE, True, 0.0
        if self.buffer or self.reading_paused:
            self._plane.loop.call_soon(self._go_on)

    def cut(self) -> None:
        """End the connection within the answer."""
        if self._state == _SERVING:
            self._exchange = None
            self._plane.inflight -= 1
        self._state = _CLOSED
        self._transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer a malformed request and end the connection: the next request's beginning is unknown."""
        self._plane.refusals[status] += 1
        kind = _KINDS.get(status, "invalid_request_error")
        body = error_body(message, kind, code=_CODES.get(status))
        self._transport.write(own_answer(status, body, b"application/json", _MORE.get(status, ()), _CLOSE))
        self._send_away(request_consumed=False)

    def _send_away(self, *, request_consumed: bool) -> None:
        """End the connection once the answer is sent. `request_consumed`: all that the client sent was read."""
        self._since_s = 0.0
        self._let_go_of_body()
        if request_consumed:
            self._state = _CLOSED
            self._transport.close()
            return
        self._state = _LINGERING
        self.buffer = b""
        if self.reading_paused:
            self.reading_paused = False
            self._transport.resume_reading()
        if self._transport.can_write_eof() and not self._transport.is_closing():  # TLS has no half-closed connections
            self._transport.write_eof()

    # ------------------------------------------------------------ time

    def expire(self) -> None:
        """End the request with an error to the client, then end the connection."""
        exchange = self._exchange
        if exchange is None:
            self.abort()
        elif exchange.relay is not None:
            exchange.relay.expire()
        else:
            exchange.expire()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def check_timeouts(self, now_s: float) -> None:
        """Refuse the client, or drop it, if it was too slow."""
        limits, state = self._plane.limits, self._state
        if not self._since_s:
            self._since_s = now_s
        if self.writing_paused or state == _CLOSED:
            self._check_unsent(now_s)
        elif state == _IDLE and self._is_idle_too_long(now_s):
            self._send_away(request_consumed=True)
        elif state == _SERVING and self.half_closed and self._is_reset():
            self._leave()
        elif self.receiving:
            self._check_request_timeouts(now_s)
        elif state == _LINGERING and now_s - self._since_s > limits.linger_s:
            self._transport.abort()

    def _is_idle_too_long(self, now_s: float) -> bool:
        plane = self._plane
        limits = plane.limits
        if plane.draining and now_s - max(self._since_s, plane.draining_since_s) > limits.drain_idle_s:
            return True
        return now_s - self._since_s > (limits.idle_s if self._has_served else limits.head_s)

    def _is_reset(self) -> bool:
        """Return whether the client's system reset the connection, which is no longer read."""
        found = self._transport.get_extra_info("socket")
        return found is not None and found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def _check_request_timeouts(self, now_s: float) -> None:
        head_s, gathered = self._plane.limits.head_s, self._gathered
        if gathered is not None:
            if reason := gathered.too_slow(now_s):
                self._refuse(408, reason)
        elif now_s - self._since_s > head_s:
            self._refuse(408, f"head: not whole within {head_s:g} s")

    def _check_unsent(self, now_s: float) -> None:
        pending_bytes = self._transport.get_write_buffer_size()
        if pending_bytes < self._pending_bytes:
            self._since_s = now_s
        elif now_s - self._since_s > self._plane.limits.write_s:
            self._transport.abort()
        self._pending_bytes = pending_bytes
