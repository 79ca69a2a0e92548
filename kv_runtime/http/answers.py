"""Responses of control planes and worker agents, and the routes of every control plane for health and version.

Every error is an OpenAI error body:

{"error": {"message", "type", "param", "code"}}
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version

import aiohttp
import msgspec
import structlog
from aiohttp import web

from kv_runtime.extras import DISTRIBUTION

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MESSAGE_CHARACTERS_MAX = 200
_PATH_CHARACTERS_MAX = 80
_CHUNK_BYTES = 64 << 10
_UNAUTHORIZED, _SERVER_ERRORS = 401, 500
_log = structlog.get_logger("http")


class BodyTooSlow(Exception):
    """A request's body did not come in time."""


class BadRequest(Exception):
    """A request's field has a value that is not allowed; `openai_errors` answers 400 with the message and the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return the JSON of an OpenAI error."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None) -> web.Response:
    """Return a response with an OpenAI error body; its type follows from the status."""
    kind = "invalid_request_error" if status < _SERVER_ERRORS else "server_error"
    kind = "authentication_error" if status == _UNAUTHORIZED else kind
    body = error_body(message, kind, param=param, code=code)
    return web.Response(status=status, body=body, content_type="application/json")


def json_response(value: object, status: int = 200) -> web.Response:
    """Return `value` as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def large_json_response(made: Callable[[], object]) -> web.Response:
    """Call `made` in a thread, and return its result as JSON: for 4,000 ranks that takes 50 ms and more.

    `made` may read only objects that do not change meanwhile.
    """
    body = await asyncio.to_thread(lambda: msgspec.json.encode(made()))
    return web.Response(body=body, content_type="application/json")


def life_routes(ready: Callable[[], Mapping[str, object]]) -> list[web.RouteDef]:
    """Return the routes `/health`, `/live`, `/version`, and `/ready`: the answer of `ready`, 503 if not ready."""

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def readiness(_: web.Request) -> web.Response:
        found = ready()
        return json_response(found, status=200 if found["ready"] else 503)

    async def shown_version(_: web.Request) -> web.Response:
        return json_response({"version": version(DISTRIBUTION)})

    handlers = {"/health": health, "/live": health, "/ready": readiness, "/version": shown_version}
    return [web.get(path, handler) for path, handler in handlers.items()]


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every refusal of the framework an OpenAI body, and every error of ours a 500 without details.

    A response that had begun is cut instead, so that clients do not take it for complete.
    """
    try:
        return await handler(request)
    except BadRequest as error:
        return error_response(400, str(error), param=error.field)
    except web.HTTPRequestEntityTooLarge as error:
        return error_response(413, f"body: {error.text}", code="body_too_large")
    except BodyTooSlow as error:
        return last_response(error_response(408, str(error), code="timeout"))
    except web.RequestPayloadError as error:
        return last_response(error_response(400, f"body: {first_line(str(error))}"))
    except web.HTTPException as error:
        if error.status < 400:  # noqa: PLR2004 - the first of the refusals
            raise
        return error_response(error.status, f"{request.method} {_shown(request.path)}: {error.reason}")
    except Exception as error:  # noqa: BLE001 - the outermost handler: the client gets a response
        transport = request.transport
        if isinstance(error, ConnectionError) and (transport is None or transport.is_closing()):
            return _cut(request)
        _log.exception("request_failed", path=request.path)
        if request.writer.output_size:
            return _cut(request)
        return error_response(500, f"our fault: {type(error).__name__}; see the log")


def _shown(path: str) -> str:
    return path if len(path) <= _PATH_CHARACTERS_MAX else f"{path[:_PATH_CHARACTERS_MAX]}..."


def last_response(response: web.Response) -> web.Response:
    """Make the response end its connection: the rest of the request's body cannot be read."""
    response.force_close()
    return response


def first_line(text: str) -> str:
    """Return the first line of an error of the framework, shortened."""
    return text.strip().split("\n", 1)[0][:_MESSAGE_CHARACTERS_MAX]


def _cut(request: web.Request) -> web.Response:
    """Abort the connection, and return a response that is not sent.

    The caller must return one to aiohttp, which would log an exception otherwise.
    """
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def bounded_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes | None:
    """Return the body of an answer to our own request; None, before its end is read, if it exceeds `bytes_max`."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        if len(data) > bytes_max:
            return None
    return bytes(data)
