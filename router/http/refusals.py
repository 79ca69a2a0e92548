"""Errors that the router answers itself, in the format of the OpenAI API.

400  the request is invalid                      404  no worker serves the model or endpoint, or no such path
413, 415, 431  too large, or an encoded body     429  the client has reached its own limit
500  a fault of the router                       502  workers failed
503  no worker is registered or eligible now, or the queue is full; `Retry-After` says when to try again
"""

from typing import Literal, NamedTuple

from kv_protocol.openai.errors import as_json
from kv_runtime.http.answers import error_body

RefusalOutcome = Literal["refused", "failed"]
_UNAUTHORIZED, _SERVER_ERRORS, _UNAVAILABLE = 401, 500, 503
_INVALID = "invalid_request_error"
_KINDS = {_UNAUTHORIZED: "authentication_error", 429: "rate_limit_error", 501: _INVALID, 505: _INVALID}
"""501 and 505 are errors of the client's message."""
_CODES = {
    401: "invalid_api_key", 403: "foreign_origin", 408: "timeout", 413: "body_too_large", 421: "unknown_host",
    431: "head_too_large",
}  # fmt: skip


class Refusal(NamedTuple):
    """An error answer; `outcome` is how the request is counted."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    outcome: RefusalOutcome = "refused"
    allowed: str = ""
    """For a 405: the method that the path has."""

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error, which follows from the status."""
        return _KINDS.get(self.status, _INVALID if self.status < _SERVER_ERRORS else "server_error")

    @property
    def body(self) -> bytes:
        """The OpenAI error."""
        return error_body(self.message, self.kind, param=self.param, code=self.code)

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """`Retry-After` in whole seconds, `Allow`, and `WWW-Authenticate`, each if the refusal has it."""
        retry_after_s = self.retry_after_s
        again = () if retry_after_s is None else ((b"retry-after", b"%d" % max(1, round(retry_after_s))),)
        allow = ((b"allow", self.allowed.encode()),) if self.allowed else ()
        return (*again, *allow, *(((b"www-authenticate", b"Bearer"),) if self.status == _UNAUTHORIZED else ()))


class RequestRejected(Exception):
    """Ends the request with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def unread(status: int, message: str) -> Refusal:
    """Return a refusal of a message that is malformed, too large or too slow, or of a client that is not served."""
    return Refusal(status, message, code=_CODES.get(status), retry_after_s=1.0 if status == _UNAVAILABLE else None)


def unavailable(message: str, code: str, *, retry_after_s: float = 1.0, outcome: RefusalOutcome = "failed") -> Refusal:
    """Return a refusal: no worker can serve the request now."""
    return Refusal(_UNAVAILABLE, message, code=code, retry_after_s=retry_after_s, outcome=outcome)


def unknown_model(name: str, models: tuple[str, ...]) -> Refusal:
    """Return a refusal that names the served `models`: no worker serves this one; 503 if there are none."""
    if not models:
        return unavailable("no worker is registered yet", "no_worker")
    return Refusal(404, f"model: found {as_json(name)}, allowed {', '.join(models)}", "model", "model_not_found")


def our_fault(error: BaseException) -> Refusal:
    """Return a refusal for a fault of the router."""
    return Refusal(500, f"our fault: {type(error).__name__}; see the log", outcome="failed")
