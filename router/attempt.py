"""One rank's try at a request, and what it says of the rank's health.

| the worker | outcome |
|---|---|
| answered | ok; client_fault where it refused the request (4xx) |
| 401, 407 | failed: it refused the router, whose token it is; clients' own are never passed on |
| 429, 503 | back_pressure: it is left alone for its `Retry-After` |
| another status of 500 or more | erred: the request's own fault, perhaps |
| a limit of our own (sockets, dials) | cancelled: it says nothing of the worker |
| 502, 504, a redirect, no connection, cut off, too slow | failed |

Source: `routing.md`, "Failures".
"""

from collections.abc import Callable

from kv_protocol.journal import AttemptOutcome
from router.core.verdict import Verdict
from router.http.exchange import Phase
from router.routing import Lease

CLIENT_FAULT, SERVER_FAULT = 400, 500
_BUSY = frozenset({429, 503})
_REFUSES_US = frozenset({401, 407})
"""As fast as it says so, it would draw all the load, and all clients would be told that their keys are wrong."""
_REDIRECTS = range(300, 400)
_GATEWAY = frozenset({502, 504})
"""What a proxy before a worker says when the worker cannot be reached: no word of the engine's."""


class Attempt:
    """One rank's try at a request: the decision, its promise, and how it failed, if it did."""

    __slots__ = ("lease", "phase", "reason", "retry_after_s", "status", "verdict")

    phase: Phase
    """Where it failed, if it did; `reason` says how, and is empty if it did not."""

    def __init__(self, verdict: Verdict, lease: Lease) -> None:
        self.verdict, self.lease = verdict, lease
        self.status = 0
        self.phase = "first_byte"
        self.reason = ""
        self.retry_after_s: float | None = None

    @property
    def outcome(self) -> AttemptOutcome:
        """What it says of the rank's health."""
        if self.phase == "local":
            return "cancelled"
        if self.retry_after_s is not None:
            return "back_pressure"
        if self.reason:
            return "erred" if self.status >= SERVER_FAULT and self.status not in _GATEWAY else "failed"
        return "client_fault" if self.status >= CLIENT_FAULT else "ok"

    def heard(self, status: int, busy_s: Callable[[], float]) -> bool:
        """The answer's head came; return whether it may be passed on. A busy worker asks for `busy_s()` seconds."""
        self.status = status
        if status < _REDIRECTS.start:
            return True
        if status in _BUSY:
            self.retry_after_s = busy_s()
        if status in _REFUSES_US:
            self.reason = f"status {status}: the worker refuses data.worker_token"
        elif status in _BUSY or status >= SERVER_FAULT or status in _REDIRECTS:
            self.reason = f"status {status}"
        return not self.reason

    @property
    def is_answered(self) -> bool:
        """Whether the client got what it asked for, as far as the status says."""
        return self.status < CLIENT_FAULT
