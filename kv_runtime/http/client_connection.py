"""One client connection of an aiohttp server: malformed requests, time limits."""

import asyncio
from typing import Any

import structlog
from aiohttp import web

from kv_runtime.http.answers import BodyTooSlow, error_response, first_line, last_response
from kv_runtime.http.connection_limit import Connections

HEAD_S = 30.0
"""Time for a request's head, from the beginning of its connection or from the response before it."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client reads the response."""
_log = structlog.get_logger("http")


def unrouted(response: web.Response) -> web.Response:
    """Return a response that ends its connection and does not pass the application, which removes `Server`."""
    response.headers["Server"] = ""  # without it the framework adds its own
    return last_response(response)


class ClientConnection(web.RequestHandler):
    """A connection that answers malformed requests with an OpenAI error body, too, and logs no traceback."""

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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection."""
        self._connections.closed(self)
        super().connection_lost(exc)

    def began(self, request: web.BaseRequest) -> None:
        """A request begins to be served."""
        self._request = request
        self._connections.began(self)

    def ended(self) -> None:
        """The response is complete, or the client is gone."""
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
            response = error_response(status, f"request: {text}", "invalid_request_error")
        else:
            _log.error("request_failed", path=request.path, exc_info=exc)
            response = error_response(status, f"our fault: {type(exc).__name__}; see the log", "server_error")
        return unrouted(response)
