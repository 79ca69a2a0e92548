"""HTTP of every process but the router's data plane: error body, token, health, metrics, a server that can stop.

Every error is an OpenAI error body: {"error": {"message", "type", "param", "code"}}.
"""

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/metrics", "/health", "/live", "/ready", "/version"})
"""What needs no token: it changes nothing and names no request."""

_METRICS_TURN_S = 0.001
"""How long a scrape computes before all else has a turn of the event loop."""

_log = structlog.get_logger("http")


class PortUsed(Exception):
    """Another process has the address."""


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
    """Give every refusal of the framework an OpenAI body, and every fault of ours a 500 that tells no secret.

    An answer that had begun is cut instead, so that nobody takes it for a whole one.
    """
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return error_response(413, f"body: {error.text}", "invalid_request_error", code="body_too_large")
    except web.HTTPException as error:
        if error.status < 400:  # noqa: PLR2004 - the first of the refusals
            raise
        kind = "invalid_request_error" if error.status < 500 else "server_error"  # noqa: PLR2004
        return error_response(error.status, f"{request.method} {request.path}: {error.reason}", kind)
    except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
        if isinstance(error, ConnectionError) and _has_gone(request):
            return _cut(request)
        _log.exception("request_failed", path=request.path)
        if request.writer.output_size:
            return _cut(request)
        return error_response(500, f"our fault: {type(error).__name__}; see the log", "server_error")


def _has_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _cut(request: web.Request) -> web.Response:
    """End the connection. The response goes nowhere; an exception instead would be logged as the framework's fault."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def require_token(token: str) -> Middleware:
    """Return a middleware that wants `Authorization: Bearer <token>` on all but `OPEN_PATHS`; none without a token.

    Without one, what a browser sends for a page of another site is refused: that page may not act for who looks at it.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # as aiohttp decoded it
        if not token and _is_for_another_site(request):
            message = f"Origin: found {request.headers['Origin']!r}, allowed this server's own at a loopback address"
            return error_response(403, message, "invalid_request_error", param="Origin")
        if not token or request.path in OPEN_PATHS or hmac.compare_digest(given, expected):
            return await handler(request)
        return error_response(401, "Authorization: a bearer token is needed", "authentication_error")

    return check


def _is_for_another_site(request: web.Request) -> bool:
    """Return whether it names an origin other than this address; one by a foreign name may be a page's own DNS."""
    origin = request.headers.get("Origin")
    if origin is None:
        return False
    return origin.partition("://")[2] != request.host or not is_loopback(request.url.host or "")


class _Some(Collector):
    """Families that are shown as if there were no others."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def metrics_handler(registry: CollectorRegistry, now: Callable[[], float] = time.perf_counter) -> Handler:
    """Return a handler that shows `registry` in the format that the scraper accepts; `now` is in seconds.

    Families are made one by one, and everybody else goes on once they have taken a millisecond: of a large fleet all
    take 10 ms and more. Between every two would be too often: turns of a loaded loop are long, and scrapers time out.
    """

    async def metrics(request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        parts, end, turn_ends_s = [], encoder(_Some()), now() + _METRICS_TURN_S
        for family in registry.collect():
            parts.append(encoder(_Some(family)).removesuffix(end))
            if now() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = now() + _METRICS_TURN_S
        return web.Response(body=b"".join((*parts, end)), headers={"Content-Type": content_type})

    return metrics


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpServer:
    """An application on an address: bound by `start`, given up at the end of `run`."""

    def __init__(self, app: web.Application, host: str, port: int, *, drain_s: float = 5.0, **runner: Any) -> None:  # noqa: ANN401
        self._host, self._port = host, port
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=drain_s, **runner)

    async def start(self, *, reuse_port: bool = False) -> None:
        """The address is bound and served.

        Raises:
            PortUsed: somebody else has it.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, reuse_port=reuse_port or None)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise PortUsed(
                f"port: found {self._host}:{self._port}, which cannot be bound ({error.strerror})"
            ) from error

    @property
    def port(self) -> int:
        """The port in use, also where 0 was asked for."""
        addresses = self._runner.addresses
        return int(addresses[0][1]) if addresses else self._port

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then refuse connections, and give running requests `drain_s` to end."""
        try:
            await stop.wait()
        finally:
            await self._runner.cleanup()
