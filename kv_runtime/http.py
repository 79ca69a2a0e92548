"""HTTP of every process but the router's data plane: error body, token, health, metrics, a server that can stop.

Every error is an OpenAI error body: {"error": {"message", "type", "param", "code"}}.
"""

import asyncio
import hmac
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import msgspec
import structlog
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kv_runtime.acceptor import Acceptor, PortUsed
from kv_runtime.clock import SystemClock
from kv_runtime.connections import CONNECTIONS_MAX, Connections, connection_families, connections_bound
from kv_runtime.hosts import HostNames
from kv_runtime.open_files import OpenFiles, open_files
from kv_runtime.slow_bodies import BodyTooSlow, BodyWatch
from kv_runtime.telemetry import Family

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/metrics", "/health", "/live", "/ready", "/version"})
"""Paths without a token: they change nothing and show no request."""

HEAD_S = 30.0
"""Time for a request's head, from the beginning of its connection or from the response before it."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client reads the response."""
RESET_LOOK_S = 0.1
"""How often half-closed connections are checked for a reset by the client."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HOST_NAMES = web.AppKey("host_names", HostNames)
_SERVER: web.AppKey["HttpServer"] = web.AppKey("server")
_REFUSED_BYTES_MAX = 64 << 10
"""Bytes read of a refused connection, so that its client gets the refusal instead of a reset."""
_MESSAGE_CHARACTERS_MAX = 200
_PATH_CHARACTERS_MAX = 80
_SHOWN_CHARACTERS_MAX = 100
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n%b"
)
_METRICS_TURN_S = 0.001
"""How long a scrape computes before it yields to the event loop."""

_log = structlog.get_logger("http")


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return the JSON of an OpenAI error."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(
    status: int, message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> web.Response:
    """Return a response with an OpenAI error body."""
    body = error_body(message, kind, param=param, code=code)
    return web.Response(status=status, body=body, content_type="application/json")


def json_response(value: object, status: int = 200) -> web.Response:
    """Return `value` as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every refusal of the framework an OpenAI body, and every error of ours a 500 without details.

    A response that had begun is cut instead, so that clients do not take it for complete.
    """
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return error_response(413, f"body: {error.text}", "invalid_request_error", code="body_too_large")
    except BodyTooSlow as error:
        return _last(error_response(408, str(error), "invalid_request_error", code="timeout"))
    except web.RequestPayloadError as error:
        return _last(error_response(400, f"body: {_first_line(str(error))}", "invalid_request_error"))
    except web.HTTPException as error:
        if error.status < 400:  # noqa: PLR2004 - the first of the refusals
            raise
        kind = "invalid_request_error" if error.status < 500 else "server_error"  # noqa: PLR2004
        return error_response(error.status, f"{request.method} {_shown(request.path)}: {error.reason}", kind)
    except Exception as error:  # noqa: BLE001 - the outermost handler: the client gets a response
        if isinstance(error, ConnectionError) and _is_disconnected(request):
            return _cut(request)
        _log.exception("request_failed", path=request.path)
        if request.writer.output_size:
            return _cut(request)
        return error_response(500, f"our fault: {type(error).__name__}; see the log", "server_error")


def _shown(path: str) -> str:
    return path if len(path) <= _PATH_CHARACTERS_MAX else f"{path[:_PATH_CHARACTERS_MAX]}..."


def _last(response: web.Response) -> web.Response:
    """Make the response end its connection: the rest of the request's body cannot be read."""
    response.force_close()
    return response


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:_MESSAGE_CHARACTERS_MAX]


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _cut(request: web.Request) -> web.Response:
    """Abort the connection. The returned response is not sent; an exception would be logged by the framework."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def require_token(token: str) -> Middleware:
    """Return a middleware that requires `Authorization: Bearer <token>` on all but `OPEN_PATHS`; "": no token.

    A request without it must name the server in `Host`, and must not have the `Origin` of another site: a browser sends
    such requests for any page that its user visits.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # as aiohttp decoded it
        if token and hmac.compare_digest(given, expected):
            return await handler(request)
        if token and request.path not in OPEN_PATHS:
            return error_response(401, "Authorization: a bearer token is needed", "authentication_error")
        if (refusal := _host_refusal(request)) is not None:
            return refusal
        if _is_for_another_site(request):
            message = f"Origin: found {request.headers['Origin']!r}, allowed this server's own"
            return error_response(403, message, "invalid_request_error", param="Origin", code="foreign_origin")
        return await handler(request)

    return check


def _host_refusal(request: web.Request) -> web.Response | None:
    """Refuse a `Host` that is not a name of the server; HTTP/1.1 needs exactly one (RFC 9112, 3.2)."""
    hosts = request.headers.getall("Host", [])
    if not hosts and request.version < HttpVersion11:
        return None
    if len(hosts) != 1:
        return error_response(400, f"host: found {len(hosts)}, allowed 1", "invalid_request_error", param="Host")
    names = request.app.get(_HOST_NAMES) or HostNames("127.0.0.1")
    if reason := names.refusal(hosts[0]):
        return error_response(421, reason, "invalid_request_error", param="Host", code="unknown_host")
    return None


def _is_for_another_site(request: web.Request) -> bool:
    """Return whether the origin differs from the called address, which is one of ours."""
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host


@web.middleware
async def _plain_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a body with a content coding: it may expand, and no handler decodes it."""
    coding = ", ".join(request.headers.getall("Content-Encoding", ()))
    if coding.lower() in {"", "identity"}:
        return await handler(request)
    message = f"content-encoding: found {coding[:_SHOWN_CHARACTERS_MAX]!r}, allowed identity"
    return _last(error_response(415, message, "invalid_request_error", param="Content-Encoding"))


@web.middleware
async def _body_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    watch = BodyWatch(request.content)
    watch.look()
    try:
        return await handler(request)
    finally:
        watch.stop()


async def _without_versions(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the software and its version from responses."""
    response.headers.popall("Server", None)


class _Some(Collector):
    """A collector of only these families."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def metrics_handler(registry: CollectorRegistry, now: Callable[[], float] = time.perf_counter) -> Handler:
    """Return a handler that serves `registry` in the format that the scraper accepts; `now` is in seconds.

    Families are made one by one; after each millisecond the handler yields to the event loop: for a large fleet all
    take 10 ms and more. Yielding after each family would be too often: a loaded loop is slow, and scrapers time out.
    """

    async def metrics(request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        parts, end, turn_ends_s = [], encoder(_Some()), now() + _METRICS_TURN_S
        for family in chain(_server_families(request), registry.collect()):
            parts.append(encoder(_Some(family)).removesuffix(end))
            if now() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = now() + _METRICS_TURN_S
        return web.Response(body=b"".join((*parts, end)), headers={"Content-Type": content_type})

    return metrics


def _expectation_refusal(request: web.BaseRequest) -> web.Response | None:
    """Refuse an `Expect` header if the body would be refused, or the expectation is unknown."""
    expected = request.headers.get("Expect", "")
    if not expected or request.version < HttpVersion11:
        return None
    if expected.lower() != "100-continue":
        message = f"expect: found {expected[:_SHOWN_CHARACTERS_MAX]!r}, allowed 100-continue"
        return _unrouted(error_response(417, message, "invalid_request_error", param="Expect"))
    length, allowed = request.content_length or 0, request.client_max_size
    if 0 < allowed < length:
        message = f"body: found {length} bytes, allowed {allowed}"
        return _unrouted(error_response(413, message, "invalid_request_error", code="body_too_large"))
    return None


def _unrouted(response: web.Response) -> web.Response:
    """Return a response that ends its connection and does not pass the application, which removes `Server`."""
    response.headers["Server"] = ""  # without it the framework adds its own
    return _last(response)


def _server_families(request: web.Request) -> Iterable[Family]:
    server = request.app.get(_SERVER)
    return () if server is None else server.families()


class _Connection(web.RequestHandler):
    """A connection that answers malformed requests with an OpenAI error body, too, and logs no traceback."""

    __slots__ = ("_answered", "_connections", "_is_half_closed", "_request")

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
        self._answered = 0
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection."""
        self._connections.closed(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # the event loop reads it
        """The client has closed its sending side: return whether its requests are still answered.

        Received requests are answered, then the connection closes. Until a response begins, an interim response (RFC
        9110, 15.2) detects whether the client is gone. An HTTP/1.0 client, which knows no interim responses, and a
        client whose response has begun count as gone.
        """
        if self._is_half_closed:  # called again when reading is resumed
            return True
        request = self._request
        if request is None and getattr(self, "_request_count", 0) <= self._answered:
            return False
        if request is not None and (request.version < HttpVersion11 or request.writer.output_size):
            return False
        self._is_half_closed = True
        if request is not None:
            self._go_on_half_closed(request)
        self._look_for_reset()
        return True

    def began(self, request: web.BaseRequest) -> None:
        """A request begins to be served."""
        self._request = request
        self._connections.began(self)
        if self._is_half_closed:
            self._go_on_half_closed(request)

    def ended(self) -> None:
        """The response is complete, or the client is gone."""
        self._request = None
        self._answered += 1
        self._connections.ended(self)
        if self._is_half_closed and getattr(self, "_request_count", 0) <= self._answered:
            self.close()

    def _go_on_half_closed(self, request: web.BaseRequest) -> None:
        if not request.content.is_eof() and getattr(self, "_request_count", 0) <= self._answered + 1:
            request.content.set_exception(web.RequestPayloadError("found a part of it, allowed all of it"))
        elif self.transport is not None and request.version >= HttpVersion11:
            self.transport.write(_CONTINUE)

    def _look_for_reset(self) -> None:
        """End the connection once the client has reset it: a half-closed connection is not read any more."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        found = transport.get_extra_info("socket")
        if found is not None and found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
        else:
            asyncio.get_running_loop().call_later(RESET_LOOK_S, self._look_for_reset)

    def shut(self) -> None:
        """Close the connection without waiting for the client; unread bytes are dropped."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.transport.abort()
        self.force_close()

    def data_received(self, data: bytes) -> None:
        """Receive bytes. Malformed bytes within a body end the body, too: the framework would let its reader wait.

        `_messages` and `_request_count` are private to the framework. If a version lacks them, the body ends by its
        time limit, and a half-closed connection ends at once.
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
            text = _first_line(message or "it cannot be read")
            response = error_response(status, f"request: {text}", "invalid_request_error")
        else:
            _log.error("request_failed", path=request.path, exc_info=exc)
            response = error_response(status, f"our fault: {type(exc).__name__}; see the log", "server_error")
        return _unrouted(response)


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
        files: Callable[[], OpenFiles] = open_files,
    ) -> None:
        """`hosts` are the allowed names in `Host`; without them those of its address.

        `connections_max` bounds open connections; `connections_bound` lowers the bound to what `files` allow at the
        start.
        """
        self._host, self._port = host, port
        self._connections_max, self._files = connections_max, files
        app[_HOST_NAMES] = hosts or HostNames(host)
        app[_SERVER] = self
        app.middlewares.insert(0, _plain_body)
        app.middlewares.append(_body_in_time)
        app.on_response_prepare.append(_without_versions)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=drain_s,
            handler_cancellation=handler_cancellation,
        )
        self._clock = SystemClock()
        self._acceptor = Acceptor(self._take, self._clock)
        self._connections = Connections(connections_max, self._clock)
        self._answer: _Answer
        self._openings: set[asyncio.Task[None]] = set()

    async def start(self, *, reuse_port: bool = False) -> None:
        """Bind and serve the address.

        Raises:
            PortUsed: another process has bound it.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "there is one after the set-up"
        self._answer, server.request_handler = server.request_handler, self._serve
        self._connections = Connections(connections_bound(self._connections_max, self._files()), self._clock)
        try:
            await self._acceptor.bind(self._host, self._port, reuse_port=reuse_port)
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
        return connection_families(self._connections.statistics(), self._acceptor.failures)

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
            opening = asyncio.get_running_loop().create_task(self._open(accepted))
            self._openings.add(opening)
            opening.add_done_callback(self._openings.discard)
        else:
            self._refuse(accepted)

    async def _open(self, accepted: socket.socket) -> None:
        """Serve the connection, unless its client has left."""
        server = self._runner.server
        assert server is not None, "sockets are accepted while it runs"
        connection = _Connection(server, self._connections)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:
            accepted.close()
            self._connections.not_opened()

    def _refuse(self, accepted: socket.socket) -> None:
        """Send the refusal and close; a client that sends its request later may see a reset instead."""
        message = f"{self._connections.statistics().bound} connections are open and in use; try again"
        body = error_body(message, "server_error")
        with accepted:
            with suppress(OSError):
                accepted.recv(_REFUSED_BYTES_MAX)
            with suppress(OSError):
                accepted.send(_REFUSAL % (len(body), body))

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast("_Connection", request.protocol)
        connection.began(request)
        try:
            refusal = _expectation_refusal(request)
            return await self._answer(request) if refusal is None else refusal
        finally:
            connection.ended()
