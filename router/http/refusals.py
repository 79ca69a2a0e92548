"""Errors that the router answers itself, in the format of the OpenAI API.

400  the request is invalid                      404  no worker serves the model or endpoint, or no such path
413, 415, 431  refused before it was read        429  the client has reached its own limit
500  a fault of the router                       502  workers failed
503  no worker is registered or eligible now, or the queue is full; `Retry-After` says when to try again
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kv_protocol.decision import Exclusion
from kv_protocol.openai.endpoints import stated_words
from kv_protocol.openai.errors import BodyTooLarge, RequestInvalid, as_json
from kv_runtime.http.answers import error_body
from kv_runtime.text.chat_messages import TextError

RefusalOutcome = Literal["refused", "failed"]
Kind = str
"""OpenAI's `type` of an error."""
_INVALID, _SERVER = "invalid_request_error", "server_error"


class Refusal(NamedTuple):
    """An error answer; `outcome` is how the request is counted."""

    status: int
    message: str
    kind: Kind
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    outcome: RefusalOutcome = "refused"
    allowed: str = ""
    """Of a 405: the method that the path has."""

    @property
    def body(self) -> bytes:
        """The OpenAI error."""
        return error_body(self.message, self.kind, param=self.param, code=self.code)

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """`Retry-After` in whole seconds, if a retry makes sense; `Allow`."""
        allow = ((b"allow", self.allowed.encode()),) if self.allowed else ()
        if self.retry_after_s is None:
            return allow
        return ((b"retry-after", b"%d" % max(1, round(self.retry_after_s))), *allow)


class RequestRejected(Exception):
    """Ends the request with a refusal, unless `exclusions` is set and the plan has another phase to try.

    `exclusions`: why each rank is excluded from the request's present phase; None: the refusal has another cause.
    """

    def __init__(self, refusal: Refusal, exclusions: tuple[Exclusion, ...] | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal, self.exclusions = refusal, exclusions


def invalid(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> Refusal:
    """Return a refusal for a client's fault."""
    return Refusal(status, message, _INVALID, param, code)


def bad_request(error: RequestInvalid | TextError) -> Refusal:
    """Return a refusal for a client's fault: 413 for what is too large, else 400."""
    if isinstance(error, BodyTooLarge):
        return invalid(str(error), error.field, "body_too_large", 413)
    return invalid(str(RequestInvalid(error.field, error.found, error.allowed)), error.field)


def unavailable(message: str, code: str, *, retry_after_s: float = 1.0, outcome: RefusalOutcome = "failed") -> Refusal:
    """Return a refusal: no worker can serve the request now."""
    return Refusal(503, message, _SERVER, code=code, retry_after_s=retry_after_s, outcome=outcome)


def beyond_limit(message: str, limit: str, retry_after_s: float) -> Refusal:
    """Return a refusal: the client has used what it may for now, by the limit of this name."""
    return Refusal(429, message, "rate_limit_error", limit, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unknown_model(name: str, models: tuple[str, ...]) -> Refusal:
    """Return a refusal: no worker serves a model of this name, and these are served; 503 if none is."""
    if not models:
        return unavailable("no worker is registered yet", "no_worker")
    return invalid(f"model: found {as_json(name)}, allowed {', '.join(models)}", "model", "model_not_found", status=404)


def endpoint_not_served(path: str, model: str, stated: Iterable[str]) -> Refusal:
    """Return a refusal: no worker of the model states the endpoint of this path."""
    message = f"{path}: no worker of {as_json(model)} serves it; they state {stated_words(stated)}"
    return invalid(message, "model", "endpoint_not_served", status=404)


def worker_failed(worker: object, reason: str) -> Refusal:
    """Return a refusal: the last worker that was tried failed."""
    message = f"worker {worker} failed: {reason}"
    return Refusal(502, message, _SERVER, code="upstream_failed", outcome="failed")


def our_fault(error: BaseException) -> Refusal:
    """Return a refusal for a fault of the router."""
    message = f"our fault: {type(error).__name__}; see the log"
    return Refusal(500, message, _SERVER, outcome="failed")
