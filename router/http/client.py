"""One connection of a client: reads requests, writes answers.

    head --head read--> body --all of it--> serving --answered--> head ...
                                            serving --answered, and it is to end--> lingering --> closed
    refused heads and bodies: answered, then lingering

| the client | what happens |
|---|---|
| has no API key of an account (`accounts.py`), if accounts are configured | 401 |
| calls us by a name that is not ours, or is a foreign page's browser | 421, 403 (`sites.py`) |
| sends the next request before it has its answer | it is kept, within a bound, and served in its turn |
| expects `100-continue` | it gets `100 Continue`, or the refusal |
| is slower than `head_s`, `body_s`, `body_total_s`, `body_rate_min_bytes_s` | 408 |
| reads nothing for `write_s` | cut off |
| resets its connection while it is served | it has left: its worker's call ends |
| closes, or half-closes, while it is served | serving continues, and a probe that changes no answer is sent: before |
| | its head `100 Continue`, between events a comment. If a reset answers the probe, the client has left |
| is refused early | its bytes are read and ignored for `linger_s`, so that it can read the answer |
"""

import asyncio
import math
import socket
from time import perf_counter
from typing import TYPE_CHECKING, cast

import structlog

from router.http.exchange import CONTINUE, JSON, Exchange, HeaderLines, own_answer
from router.http.heads import Malformed, RequestHead
from router.http.refusals import our_fault, unread
from router.http.request_body import GatheredBody

if TYPE_CHECKING:
    from router.http.plane import HttpPlane

_TURN_BYTES = 64 << 10
"""If one read brings this many bytes of a body, other connections get their turn before the next read."""
_RESET_CHECK_S, _RESET_CHECK_S_MAX = 0.00025, 0.25
"""Seconds from a probe to the first and last check for a reset (each 4 x the one before); then the sweep checks."""
_CLOSE = b"connection: close\r\n"
_IDLE, _HEAD, _BODY, _SERVING, _LINGERING, _CLOSED = range(6)

_log = structlog.get_logger("http")


class ClientConnection(asyncio.Protocol):
    """One client connection, registered with `plane` while open."""

    __slots__ = (
        "_began_s", "_exchange", "_gathered", "_has_more", "_keep_alive", "_pending_bytes", "_plane", "_posts", "_read",
        "_service", "_since_s", "_state", "_transport", "abort", "buffer", "due_s", "half_closed", "http_1_1",
        "outward", "reading_paused", "write", "writing_paused",
    )  # fmt: skip

    def __init__(self, plane: "HttpPlane") -> None:
        self._plane, self.outward = plane, plane.upstreams
        self._read, self._posts, self._service = plane.requests.read, plane.posts, plane.service
        self._state = _HEAD
        self.buffer = b""
        """Bytes that were read and not yet served: an incomplete head, or the next requests."""
        self._gathered: GatheredBody | None = None
        """The body that is awaited or, once it is complete, counted until its request is answered."""
        self._exchange: Exchange | None = None
        self._keep_alive = self.http_1_1 = True
        self.writing_paused = self.reading_paused = self.half_closed = False
        self._has_more = False
        """Whether `finish` has more to do than to await the next request."""
        self._pending_bytes = 0

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = cast("asyncio.Transport", transport)
        self.write, self.abort = self._transport.write, self._transport.abort
        self._began_s = self._since_s = self.due_s = 0.0
        """`_since_s`: time of the first check since the state last changed or a byte last came. `due_s`: no check is
        needed before this time; 0: the state has changed, or a byte came, since the last check."""
        self._transport.set_write_buffer_limits(high=self._plane.limits.write_bytes_max)
        if full := self._plane.opened(self):
            self._refuse(503, full)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it went does not matter
        """The connection is closed: the client is gone."""
        self._let_go_of_body()
        self._plane.closed(self)
        self._leave()
        self.due_s = math.inf

    def eof_received(self) -> bool:
        """The client sends no more. Return whether it may still get answers."""
        state = self._state
        is_waiting = state == _SERVING or (state <= _HEAD and (self.buffer or self.writing_paused))
        if not (is_waiting and self._transport.can_write_eof()):
            self._leave()
            return False
        self.half_closed, self.due_s = True, 0.0
        if not self.buffer:
            self.end_with_answer()
        if self._exchange is None:
            self._go_on()
        elif probe := self._exchange.probe:
            self._transport.write(probe)
            self._plane.loop.call_later(_RESET_CHECK_S, self._check_reset, _RESET_CHECK_S)
        return True

    def _check_reset(self, waited_s: float) -> None:
        """Leave if the probe was answered by a reset: reading a half-closed connection does not show it."""
        if self._state != _SERVING:
            return
        if self._is_reset():
            self._leave()
        elif waited_s < _RESET_CHECK_S_MAX:
            self._plane.loop.call_later(3 * waited_s, self._check_reset, 4 * waited_s)

    def _leave(self) -> None:
        state, self._state, self.due_s = self._state, _CLOSED, 0.0
        self.buffer = b""
        exchange, self._exchange = self._exchange, None
        if state == _SERVING and exchange is not None:
            self.abort()
            self._plane.gone += 1
            exchange.leave()

    def pause_writing(self) -> None:
        """The client reads too slowly: stop reading from its worker."""
        self.writing_paused = True
        self.due_s, self._pending_bytes = 0.0, self._transport.get_write_buffer_size()
        if self._exchange is not None and self._exchange.relay is not None:
            self._exchange.relay.pause()

    def resume_writing(self) -> None:
        """The client has read most of the pending bytes: read from its worker again, or serve its next request."""
        self.writing_paused = False
        if self._exchange is not None:
            if self._exchange.relay is not None:
                self._exchange.relay.resume()
        else:
            self._go_on()

    # ------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client, and serve the request that they complete."""
        try:
            if self._state or self.writing_paused:
                exchange, serve = self._take(data), self._service
            else:
                exchange, serve = self._read(data, self, perf_counter(), self._posts)
                if serve is None:
                    exchange, serve = self._checked(exchange, data), self._service
        except Malformed as error:
            self._refuse(error.status, str(error))
            return
        if exchange is None:
            return
        self._exchange, self._state = exchange, _SERVING
        try:
            serve(exchange)
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            _log.exception("request_failed", path=exchange.path)
            if exchange.relay is not None or exchange.client is None:
                self.abort()
            else:
                exchange.refuse(our_fault(error))

    def _take(self, data: bytes) -> Exchange | None:
        """Take bytes that continue a request, or that come before their turn; return the request if it is complete."""
        state = self._state
        if state == _BODY:
            assert self._gathered is not None, "there is one while a body is awaited"
            if len(data) >= _TURN_BYTES and not self._transport.is_closing():
                self._transport.pause_reading()  # libuv would read up to 32 times in a row, 8 MB of a body
                self._plane.loop.call_soon(self._read_on)
            return self._feed_body(self._gathered, data)
        if state > _SERVING:
            return None
        data = self.buffer + data
        if state == _SERVING or self.writing_paused:
            self._keep(data)
            return None
        if not self._began_s:
            self._began_s, self.due_s = perf_counter(), 0.0
        self.buffer = b""
        found, serve = self._read(data, self, self._began_s, self._posts)
        if serve is None:
            return self._checked(found, data)
        exchange: Exchange = found
        if self.half_closed:
            self._end_after(exchange)
        return exchange

    def _keep(self, data: bytes) -> None:
        """Keep what came of the next requests; beyond the bound nothing is read until they are served."""
        self.buffer, self._has_more = data, True
        if len(data) > self._plane.limits.pipelined_bytes_max and not self.reading_paused:
            self.reading_paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Serve the requests that came while there was another one, or while the client read too slowly."""
        if self._state <= _HEAD and not self.writing_paused:
            if self.buffer:
                self._begin_head()
                self.data_received(b"")
            elif self.half_closed:
                self._send_away(request_consumed=True)
        if self.reading_paused and len(self.buffer) <= self._plane.limits.pipelined_bytes_max:
            self.reading_paused = False
            self._read_on()

    def _begin_head(self) -> None:
        """The next request begins, unless it has begun."""
        if self._state == _IDLE:
            self._state, self._began_s, self.due_s = _HEAD, perf_counter(), 0.0

    def _read_on(self) -> None:
        if not self.reading_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _checked(self, head: RequestHead | None, data: bytes) -> Exchange | None:
        """Check the head at the start of `data` (None: it is not complete); return its request if it is complete."""
        if head is None:
            self.buffer = data
            self._begin_head()
            if self.half_closed:
                self._send_away(request_consumed=True)
            return None
        plane, headers = self._plane, head.headers
        lines, account = plane.sites.checked(headers), plane.account(head)
        if head.body_bytes > plane.limits.body_bytes_max:
            raise Malformed(413, f"body: found {head.body_bytes} bytes, allowed {plane.limits.body_bytes_max}")
        began_s = self._began_s if self._state == _HEAD else perf_counter()
        parts = head.method, head.path, head.query, headers, head.body or b"", began_s, lines
        exchange, self.http_1_1 = Exchange(self, *parts, account=account), head.http_1_1
        if not head.keep_alive:
            self._end_after(exchange)
        if head.body is not None:
            return self._complete(exchange, head.rest)
        gathered = self._gathered = GatheredBody(head.body_bytes, exchange, plane)
        self._state, self.due_s = _BODY, 0.0
        if head.rest:
            return self._feed_body(gathered, head.rest)
        if b"expect" in headers and head.http_1_1:
            self.write(CONTINUE)
        return None

    def _feed_body(self, gathered: GatheredBody, data: bytes) -> Exchange | None:
        end = gathered.feed(data)
        if end < 0:
            return None
        gathered.exchange.body = gathered.take()
        return self._complete(gathered.exchange, data[end:])

    def _complete(self, exchange: Exchange, rest: bytes) -> Exchange | None:
        """Return the request, which was checked and is complete; `rest` follows it. None: it was answered here."""
        plane = self._plane
        self._keep(rest)
        if self._keep_alive and (plane.draining or (self.half_closed and not rest)):
            self._end_after(exchange)
        allowed = plane.sites.preflight(exchange.method, exchange.headers)
        if not (plane.is_over or allowed):
            return exchange
        self._exchange, self._state = exchange, _SERVING
        if plane.is_over:
            exchange.expire()
        else:
            exchange.answer(200, b"", headers=allowed)
        return None

    def _let_go_of_body(self) -> None:
        if self._gathered is not None:
            self._gathered.release()
            self._gathered = None

    # ------------------------------------------------------------ answers

    @property
    def receiving(self) -> bool:
        """Whether a request's head or body has begun and is not complete."""
        return self._state == _BODY or (self._state == _HEAD and bool(self.buffer))

    @property
    def is_serving(self) -> bool:
        """Whether a request waits for the end of its answer."""
        return self._exchange is not None

    def end_with_answer(self) -> None:
        """End the connection with the answer in progress, if its head can still say so or the client sends no more."""
        exchange = self._exchange
        self.due_s = min(self.due_s, self._since_s)  # checked soon: draining keeps idle connections for less time
        if exchange is not None and self._keep_alive and (self.half_closed or not exchange.has_begun):
            self._end_after(exchange)

    def _end_after(self, exchange: Exchange) -> None:
        self._keep_alive, self._has_more = False, True
        exchange.connection_line += _CLOSE

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Send a complete answer of the router."""
        exchange = self._exchange
        assert exchange is not None, "it is being served"
        out = own_answer(status, body, content_type, headers, exchange.connection_line)
        self._transport.write(out[: -len(body)] if body and exchange.method == "HEAD" else out)
        self.finish()

    def finish(self) -> None:
        """The answer is complete: the next request may come, or the connection ends."""
        self._exchange, self._state, self.due_s = None, _IDLE, 0.0
        if self._has_more:
            self._has_more = False
            self._let_go_of_body()
            if not self._keep_alive:
                self._send_away(request_consumed=not self.buffer)
            elif self.buffer or self.reading_paused:
                if self.buffer:
                    self._begin_head()
                self._plane.loop.call_soon(self._go_on)

    def cut(self) -> None:
        """End the connection within the answer."""
        self._exchange, self._state, self.due_s = None, _CLOSED, 0.0
        self.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer a malformed request and end the connection: the next request's beginning is unknown."""
        self._plane.refusals[status] += 1
        refusal = unread(status, message)
        self._transport.write(own_answer(status, refusal.body, JSON, refusal.headers, _CLOSE))
        self._send_away(request_consumed=False)

    def _send_away(self, *, request_consumed: bool) -> None:
        """End the connection once the answer is sent. `request_consumed`: all that the client sent was read."""
        self.due_s = 0.0
        self._let_go_of_body()
        if request_consumed:
            self._state = _CLOSED
            self._transport.close()
            return
        self._state = _LINGERING
        self.buffer = b""
        if self.reading_paused:
            self.reading_paused = False
            self._read_on()
        if self._transport.can_write_eof() and not self._transport.is_closing():  # TLS has no half-closed connections
            self._transport.write_eof()

    # ------------------------------------------------------------ time

    def expire(self) -> None:
        """End the request with an error to the client, then end the connection."""
        if self._exchange is None:
            self.abort()
        else:
            self._exchange.expire()

    def check_timeouts(self, now_s: float) -> None:
        """Refuse the client, or drop it, if it was too slow."""
        state = self._state
        if not self.due_s:
            self._since_s = now_s
        self.due_s = now_s
        if self.writing_paused or state == _CLOSED:
            self._check_unsent(now_s)
        elif state == _SERVING:
            if not self.half_closed:
                self.due_s = math.inf
            elif self._is_reset():
                self._leave()
        elif self.receiving:
            self._check_request_timeouts(now_s)
        elif state != _LINGERING:
            self._check_idle(now_s)
        elif now_s - self._since_s > self._plane.limits.linger_s:
            self.abort()

    def _check_idle(self, now_s: float) -> None:
        plane = self._plane
        limits = plane.limits
        self.due_s = self._since_s + (limits.idle_s if self._state == _IDLE else limits.head_s)
        if plane.draining:
            self.due_s = min(self.due_s, max(self._since_s, plane.draining_since_s) + limits.drain_idle_s)
        if now_s > self.due_s:
            self._send_away(request_consumed=True)

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
            self.abort()
        self._pending_bytes = pending_bytes
