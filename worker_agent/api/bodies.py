"""Decodes request bodies, small ones on the event loop, large ones on a thread; and answers those that are refused.

One thread decodes large bodies, within the bounds of `kv_protocol/body_limits.py`. Other large bodies wait until it has
decoded one, even if the body's client has disconnected; the event loop serves other requests meanwhile.

A body that is too large gets a 413, any other invalid request a 400 (`refusal`). An unknown model gets a 404
(`no_such_model`).
"""

import asyncio
import math
import re
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from aiohttp import web

from kv_protocol.body_limits import SCANNED_BYTES, Body, BodyLimits, Bytes, read_body
from kv_protocol.openai.errors import BodyTooLarge, RequestInvalid, as_json
from kv_protocol.openai.requests import Request
from kv_runtime.http.answers import error_body, error_response
from kv_runtime.text.chat_messages import TextError
from worker_agent.api.in_flight import HandledRequest
from worker_agent.port.types import EncoderUnavailable, EngineError, EngineStopped, RequestRefused

_DP_RANK = "x-dp-rank"
_RANK, _SHOWN_CHARACTERS_MAX = re.compile("[0-9]{1,4}"), 16
_Done = TypeVar("_Done")


async def read_request(
    http: web.Request, decode: Callable[[Bytes], Request], limits: BodyLimits, thread: Executor
) -> tuple[Request, Body]:
    """Return the request and its body; `thread` decodes a large body.

    Images are cut out of a large body before it is decoded; the returned body has them.

    Raises:
        RequestInvalid: the body is not a valid request; `BodyTooLarge`: it exceeds a bound.
        HTTPRequestEntityTooLarge: the body has more bytes than the application accepts.
    """
    data = await http.read()
    if len(data) <= SCANNED_BYTES:
        return decode(data), Body(data)

    def read() -> tuple[Request, Body]:
        body = read_body(data, limits, uuid.uuid4().hex)
        return decode(body.text), body

    return await asyncio.get_running_loop().run_in_executor(thread, read)


def dp_rank_of(http: web.Request, dp_ranks: tuple[int, ...]) -> int | None:
    """Return the rank that `x-dp-rank` names, None without it; raise `RequestInvalid` if it is not of `dp_ranks`."""
    rank = http.headers.get(_DP_RANK)
    if rank is not None and (_RANK.fullmatch(rank) is None or int(rank) not in dp_ranks):
        raise RequestInvalid(_DP_RANK, rank[:_SHOWN_CHARACTERS_MAX], f"one of {dp_ranks}")
    return None if rank is None else int(rank)


def refusal(error: RequestInvalid | TextError) -> web.Response:
    """Return the answer to an invalid request: 413 if it is too large, else 400."""
    message = str(RequestInvalid(error.field, error.found, error.allowed))
    if isinstance(error, BodyTooLarge):
        return error_response(413, message, param=error.field, code="body_too_large")
    return error_response(400, message, param=error.field)


def no_such_model(model: str, names: Iterable[str]) -> web.Response:
    """Return the answer to a request for a model that is not one of `names`."""
    message = f"model: found {as_json(model)}, allowed {', '.join(names)}"
    return error_response(404, message, param="model", code="model_not_found")


def engine_refusal(error: EngineError) -> HandledRequest:
    """Return the answer and the outcome of a request that the engine refused, or failed before the answer began."""
    if isinstance(error, RequestRefused):
        return error_response(400, str(error), param=error.field), "refused"
    status, body = failure(error)
    response = web.Response(status=status, body=body, content_type="application/json")
    if isinstance(error, EncoderUnavailable) and error.retry_s is not None:
        response.headers["Retry-After"] = str(math.ceil(error.retry_s))
    return response, "failed"


def failure(error: EngineError) -> tuple[int, bytes]:
    """Return the HTTP status and the error body of the answer to a request that the engine failed."""
    if not isinstance(error, EngineStopped):
        return 500, error_body(str(error), "server_error", code="request_failed")
    code = "encoder_unavailable" if isinstance(error, EncoderUnavailable) else "engine_stopped"
    return 503, error_body(str(error), "server_error", code=code)


async def worked(is_long: bool, work: Callable[[], _Done]) -> _Done:  # noqa: FBT001 - a property of the work
    """Do the work and return its result; a thread does it if `is_long`."""
    return await asyncio.to_thread(work) if is_long else work()
