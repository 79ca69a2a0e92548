"""Finds the endpoint of a path, in the router and in `router pools`, and answers paths about models and the process.

GET  /v1/models, /v1/models/{name}            the names that are served
GET  /health, /live, /ready, /version         of this process; /ready is 503 with the reason while it is not to be used
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
import structlog

from kv_protocol.errors import shortened
from kv_protocol.openai.errors import BodyTooLarge, RequestInvalid
from kv_runtime.text.chat_messages import TextError
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.routing import Readiness
from router.http import refusals
from router.http.exchange import Exchange
from router.http.refusals import Refusal, RequestRejected
from router.prompt.encoding_pool import EncodersBusy

if TYPE_CHECKING:
    from router.request.request import Request

Endpoint = Callable[[Exchange], object]
_MODEL = "/v1/models/"
_CLIENT_FAULTS = frozenset({"pinned", "taint", "lora", "endpoint"})
"""Reasons for which a request can never be served: the client's fault, and not worth a retry."""
_log = structlog.get_logger("router")


def answer(exchange: Exchange, value: object, status: int = 200) -> None:
    """Answer with `value` as JSON."""
    exchange.answer(status, msgspec.json.encode(value))


class Replies:
    """Answers every exchange of a data plane: calls the endpoint of its path, or refuses it."""

    def __init__(
        self,
        posts: Mapping[str, Endpoint],
        models: Callable[[], Sequence[str]],
        readiness: Callable[[], Readiness],
        refuse: Callable[[Exchange, Refusal], None] = Exchange.refuse,
        passes: Callable[[Exchange], bool] = lambda _: False,
    ) -> None:
        """`posts` has the endpoint of each POST path. `passes` serves an unknown path, or returns false."""
        self.posts, self._models, self._readiness = posts, models, readiness
        self._refuse, self._passes = refuse, passes
        self._gets: dict[str, Endpoint] = {
            "/v1/models": lambda exchange: answer(exchange, {"object": "list", "data": list(map(_model, models()))}),
            "/health": lambda exchange: answer(exchange, {"status": "ok"}),
            "/live": lambda exchange: answer(exchange, {"status": "ok"}),
            "/ready": self._ready,
            "/version": lambda exchange: answer(exchange, {"version": version("kv-router")}),
        }

    def __call__(self, exchange: Exchange) -> None:
        """Answer the exchange, now or later. On an exception the connection answers with a 500."""
        path, method = exchange.path, exchange.method
        allowed, endpoint = "POST", self.posts.get(path)
        if endpoint is None:
            allowed, endpoint = "GET", self._gets.get(path) or (self._named if path.startswith(_MODEL) else None)
        if endpoint is None:
            if not self._passes(exchange):
                message = f"{method} {shortened(path)}: Not Found"
                self._refuse(exchange, Refusal(404, message))
        elif allowed == method or (allowed, method) == ("GET", "HEAD"):
            endpoint(exchange)
        else:
            message = f"method: found {method}, allowed {allowed}"
            self._refuse(exchange, Refusal(405, message, allowed=allowed))

    def _named(self, exchange: Exchange) -> None:
        name, names = unquote(exchange.path.removeprefix(_MODEL)), self._models()
        if name in names:
            answer(exchange, _model(name))
        else:
            exchange.refuse(refusals.unknown_model(name, tuple(names)))

    def _ready(self, exchange: Exchange) -> None:
        readiness = self._readiness()
        answer(exchange, readiness._asdict(), 200 if readiness.ready else 503)


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kv-router"}


def refusal_of(error: BaseException, request: "Request[Any]") -> Refusal:
    """Return the refusal that answers the error; log the error if it is a fault of the router."""
    if isinstance(error, RequestRejected):
        return error.refusal
    if isinstance(error, BodyTooLarge):
        return Refusal(413, str(error), error.field, "body_too_large")
    if isinstance(error, (RequestInvalid, TextError)):
        return Refusal(400, str(RequestInvalid(error.field, error.found, error.allowed)), error.field)
    if isinstance(error, (NoEligibleWorker, WorkerNotNamed)):
        return _undecided(error)
    if isinstance(error, EncodersBusy):
        return refusals.unavailable(str(error), "overloaded")
    _log.error("request_failed", path=request.exchange.path, exc_info=error, **log_names(request))
    return refusals.our_fault(error)


def _undecided(error: NoEligibleWorker | WorkerNotNamed) -> Refusal:
    if isinstance(error, WorkerNotNamed):
        return Refusal(400, str(error), error.field)
    if error.kinds == {"max_seq_len"}:
        return Refusal(400, str(error), code="context_length_exceeded")
    if error.kinds and error.kinds <= _CLIENT_FAULTS:
        return Refusal(400, str(error), code="no_such_worker")
    return refusals.unavailable(str(error), "no_eligible_worker")


def log_names(request: "Request[Any]") -> dict[str, str]:
    """Return the ids that a log line of the request has, as far as they are known."""
    names = {"trace_id": request.trace.hex_id} if request.trace is not None else {}
    return names | {"request_id": request.route.request_id} if request.is_read else names
