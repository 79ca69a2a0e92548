"""The HTTP server of every process but the router's data plane: bound, limited, and stopped in order.

| a client connects | outcome |
|---|---|
| fewer connections are open than the bound | the connection is served |
| the bound is reached, and some connection is idle | the connection that has been idle longest is closed |
| the bound is reached, and no connection is idle | 503 with `Retry-After`, then the new connection is closed |
| `CLOSING_MAX` connections above the bound are open | 503 likewise, even if some connection is idle |

A connection is idle while no handler runs for it: it is new, kept alive, or its client has not read all of an answer.
Closings and refusals at the bound are counted and logged. Every connection takes a file descriptor, so the bound
depends on the limit of open files.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import structlog
from aiohttp import HttpVersion11, web

from kv_runtime.clock import Clock
from kv_runtime.files import RESERVED, OpenFiles, open_files
from kv_runtime.http.acceptor import ACCEPT_ERRORS, Acceptor, PortUsed
from kv_runtime.http.access import HOST_NAMES
from kv_runtime.http.answers import BodyTooSlow, Handler, error_body, error_response, first_line, last_response
from kv_runtime.http.hosts import HostNames
from kv_runtime.http.metrics import SERVER_FAMILIES
from kv_runtime.telemetry import Family, RateLimitedLog, by_name, counter, gauge

CONNECTIONS_MAX = 16_384
"""The default maximum of a server that is no control plane."""
CONTROL_CONNECTIONS_MAX = 32
"""The maximum of a control plane; the reserved files (`RESERVED`) include these."""
CONNECTIONS_MIN = 16
"""The minimum of a server's bound, however few files are free."""
CLOSING_MAX = 8
"""How many connections above the bound may be open while idle ones close, which takes one turn of the event loop."""
HEAD_S = 30.0
"""Time for a request's head, from the beginning of its connection or from the response before it."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client reads the response."""
BODY_S, RATE_MIN_BYTES_S, TOTAL_S = 30.0, 500.0, 300.0
"""A body has `BODY_S` seconds, a second more for each `RATE_MIN_BYTES_S` bytes that have come, and `TOTAL_S` in all."""
_Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_REFUSED_BYTES_MAX = 64 << 10
"""Bytes read of a refused connection, so that its client gets the refusal instead of a reset."""
_SHOWN_CHARACTERS_MAX = 100
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n%b"
)
_log = structlog.get_logger("http")


def connections_bound(connections_max: int, files: OpenFiles) -> int:
    """Return how many connections a server may have: half of the free files, at most `connections_max`.

    The other half is for connections that serving the requests needs, such as those of an agent to its engine.
    """
    free = files.allowed - files.used - RESERVED
    return min(connections_max, max(CONNECTIONS_MIN, free // 2))


class Connections:
    """Admits connections up to `bound`; at the bound closes an idle one for each new one."""

    def __init__(self, bound: int, clock: Clock) -> None:
        self.bound = bound
        self._log = RateLimitedLog(_log, clock)
        self._open: set[ClientConnection] = set()
        self._idle: dict[ClientConnection, None] = {}
        """The connection that has been idle longest comes first."""
        self._idle_closed = self._refused = 0

    def admit(self) -> bool:
        """Return whether one more connection may open; the caller must count it (`opened`) at once."""
        count = len(self._open)
        if count >= self.bound and (count >= self.bound + CLOSING_MAX or not self._close_idle()):
            self._refused += 1
            self._note("refused")
            return False
        return True

    def opened(self, connection: "ClientConnection") -> None:
        """Record that an admitted connection opens; it is in use until `ended`."""
        self._open.add(connection)

    def closed(self, connection: "ClientConnection") -> None:
        """Record that the connection is being closed, or that its client left before it was open."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def began(self, connection: "ClientConnection") -> None:
        """Record that a handler runs for a request on the connection."""
        self._idle.pop(connection, None)

    def ended(self, connection: "ClientConnection") -> None:
        """Record that the connection has opened, or its handler has ended; it is idle now, unless it is closed."""
        if connection in self._open:
            self._idle[connection] = None

    def _close_idle(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self._idle_closed += 1
        self._note("idle_closed")
        oldest.shut()
        return True

    def _note(self, outcome: str) -> None:
        self._log.warning("connections_bound_reached", key=outcome, outcome=outcome, connections_max=self.bound)

    def families(self, accept_failures: dict[str, int]) -> Iterator[Family]:
        """Yield the open connections, what happened at the bound, and failed accepts by the error's name."""
        idle = len(self._idle)
        states = by_name((), {"in_use": len(self._open) - idle, "idle": idle})
        meaning = "Open connections to this HTTP server: in_use while a request is served, else idle"
        yield gauge("server_connections", meaning, ("state",), states)
        meaning = "Largest number of open connections to this HTTP server"
        yield gauge("server_connections_max", meaning, (), [((), self.bound)])
        outcomes = by_name((), {"idle_closed": self._idle_closed, "refused": self._refused})
        meaning = "Connections that came while all allowed ones were open: an idle one was closed, or refused with 503"
        yield counter("server_connections_at_bound", meaning, ("outcome",), outcomes)
        failures, meaning = dict.fromkeys(ACCEPT_ERRORS, 0) | accept_failures, "Connections that could not be accepted"
        yield counter("server_accept_failures", f"{meaning}, by error", ("error",), by_name((), failures))


def unrouted(response: web.Response) -> web.Response:
    """Return a response that bypasses the application: it ends its connection, and hides the software's version."""
    response.headers["Server"] = ""  # without this header the framework adds its own
    return last_response(response)


class ClientConnection(web.RequestHandler):
    """A counted connection that answers malformed requests with an OpenAI error body, too, and logs no traceback."""

    __slots__ = ("_connections", "_request")

    def __init__(self, manager: web.Server, connections: Connections) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=HEAD_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._connections = connections
        self._request: web.BaseRequest | None = None
        connections.opened(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve the client; the connection is idle so far."""
        super().connection_made(transport)
        self._connections.ended(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection."""
        self._connections.closed(self)
        super().connection_lost(exc)

    def began(self, request: web.BaseRequest) -> None:
        """Count the connection as in use: a request begins."""
        self._request = request
        self._connections.began(self)

    def ended(self) -> None:
        """Count the connection as idle, unless it is closed: its request has ended."""
        self._request = None
        self._connections.ended(self)

    def shut(self) -> None:
        """Close the connection without waiting for the client; unread bytes are dropped."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.transport.abort()
        self.force_close()

    def data_received(self, data: bytes) -> None:
        """Receive bytes. Malformed bytes within a body end the body, too: the framework would let its reader wait.

        `_messages` is private to the framework. If a version lacks it, the body ends by its time limit.
        """
        super().data_received(data)
        request = self._request
        if request is not None and getattr(self, "_messages", None) and not request.content.is_eof():
            request.content.set_exception(web.RequestPayloadError("found bytes that are no chunk, allowed chunks"))

    def log_exception(self, *args: object, **kw: Any) -> None:  # noqa: ANN401 - as the framework has it
        """Log errors of ours, but not malformed or slow bodies: the client has its response."""
        if isinstance(kw.get("exc_info"), BodyTooSlow | web.RequestPayloadError):
            _log.debug("request_malformed", peer=str(self.peername), reason=str(kw["exc_info"]))
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the error response; the connection ends with it."""
        if request.writer.output_size:
            raise ConnectionError("a part of another answer was sent")
        if status < 500:  # noqa: PLR2004 - the first server error
            _log.debug("request_malformed", peer=request.remote, reason=message)
            text = first_line(message or "it cannot be read")
            response = error_response(status, f"request: {text}")
        else:
            _log.error("request_failed", path=request.path, exc_info=exc)
            response = error_response(status, f"our fault: {type(exc).__name__}; see the log")
        return unrouted(response)


@web.middleware
async def _plain_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a body with a content coding: it may expand, and no handler decodes it."""
    coding = ", ".join(request.headers.getall("Content-Encoding", ()))
    if coding.lower() in {"", "identity"}:
        return await handler(request)
    message = f"content-encoding: found {coding[:_SHOWN_CHARACTERS_MAX]!r}, allowed identity"
    return last_response(error_response(415, message, param="Content-Encoding"))


@web.middleware
async def _body_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Limit the time that a body takes after its head; reading one that is too slow raises `BodyTooSlow`."""
    body, loop = request.content, asyncio.get_running_loop()
    began_s = loop.time()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        """Check the body's time limit, now and at its deadline."""
        nonlocal timer
        if body.is_eof():
            return
        found = body.total_bytes
        due_s = began_s + min(TOTAL_S, BODY_S + found / RATE_MIN_BYTES_S)
        if due_s > loop.time():
            timer = loop.call_at(due_s, look)
            return
        allowed = f"{RATE_MIN_BYTES_S:g} a second after {BODY_S:g} s, and {TOTAL_S:g} s in all"
        took = f"found {found} bytes within {loop.time() - began_s:.0f} s"
        body.set_exception(BodyTooSlow(f"body: {took}, allowed {allowed}"))

    look()
    try:
        return await handler(request)
    finally:
        if timer is not None:
            timer.cancel()


async def _without_versions(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the software and its version from responses."""
    response.headers.popall("Server", None)


def _expectation_refusal(request: web.BaseRequest) -> web.Response | None:
    """Refuse an `Expect` header if the body would be refused, or the expectation is unknown."""
    expected = request.headers.get("Expect", "")
    if not expected or request.version < HttpVersion11:
        return None
    if expected.lower() != "100-continue":
        message = f"expect: found {expected[:_SHOWN_CHARACTERS_MAX]!r}, allowed 100-continue"
        return unrouted(error_response(417, message, param="Expect"))
    length, allowed = request.content_length or 0, request.client_max_size
    if 0 < allowed < length:
        message = f"body: found {length} bytes, allowed {allowed}"
        return unrouted(error_response(413, message, code="body_too_large"))
    return None


class HttpServer:
    """An application on an address: bound by `start`, released at the end of `run`."""

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        hosts: HostNames | None = None,
        drain_s: float = 5.0,
        handler_cancellation: bool = False,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`hosts` are the allowed names in `Host`; None: those that the address implies.

        `connections_max` bounds open connections; `connections_bound` lowers the bound to what open files allow now.
        """
        self._host, self._port = host, port
        app[HOST_NAMES] = hosts or HostNames(host)
        app[SERVER_FAMILIES] = self.families
        app.middlewares.insert(0, _plain_body)
        app.middlewares.append(_body_in_time)
        app.on_response_prepare.append(_without_versions)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=drain_s,
            handler_cancellation=handler_cancellation,
        )
        self._clock = Clock()
        self._acceptor = Acceptor(self._take, self._clock)
        self._connections = Connections(connections_bound(connections_max, open_files()), self._clock)
        self._answer: _Answer
        self._openings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind and serve the address.

        Raises:
            PortUsed: another process has bound it.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "there is one after the set-up"
        self._answer, server.request_handler = server.request_handler, self._serve
        try:
            await self._acceptor.bind(self._host, self._port, reuse_port=False)
        except PortUsed:
            await self._runner.cleanup()
            raise
        self._acceptor.start()

    @property
    def port(self) -> int:
        """The bound port, also if 0 was configured."""
        return self._acceptor.port or self._port

    def families(self) -> Iterable[Family]:
        """Return the metrics of this server's connections."""
        return self._connections.families(self._acceptor.failures)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then refuse connections and wait up to `drain_s` for running requests."""
        try:
            await stop.wait()
        finally:
            self._acceptor.close()
            await asyncio.gather(*self._openings)
            await self._runner.cleanup()

    def _take(self, accepted: socket.socket) -> None:
        if self._connections.admit():
            server = self._runner.server
            assert server is not None, "sockets are accepted while it runs"
            connection = ClientConnection(server, self._connections)
            opening = asyncio.get_running_loop().create_task(self._open(connection, accepted))
            self._openings.add(opening)
            opening.add_done_callback(self._openings.discard)
        else:
            self._refuse(accepted)

    async def _open(self, connection: ClientConnection, accepted: socket.socket) -> None:
        """Serve the connection, unless its client has left."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:
            accepted.close()
            self._connections.closed(connection)

    def _refuse(self, accepted: socket.socket) -> None:
        """Send the refusal and close; a client that sends its request later may see a reset instead."""
        message = f"{self._connections.bound} connections are open and in use; try again"
        body = error_body(message, "server_error")
        with accepted:
            with suppress(OSError):
                accepted.recv(_REFUSED_BYTES_MAX)
            with suppress(OSError):
                accepted.send(_REFUSAL % (len(body), body))

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast("ClientConnection", request.protocol)
        connection.began(request)
        try:
            return _expectation_refusal(request) or await self._answer(request)
        finally:
            connection.ended()
