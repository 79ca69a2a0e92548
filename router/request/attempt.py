"""One attempt to serve a request, and what its end says about a worker rank's health.

| the worker | outcome |
|---|---|
| answered | ok; client_fault where it refused the request (4xx) |
| 401, 407 | failed: it refused the router's token; clients' tokens are never passed on |
| 429, 503 | back_pressure: it gets no requests for its `Retry-After` |
| another status of 500 or more | erred: possibly the request's fault |
| a limit of the router (sockets, dials) | cancelled: it says nothing of the worker |
| 502, 504, a redirect, no connection, cut off, too slow | failed |

Where no other worker is left, a failed answer is passed on as it came, with the reason in `x-kv-failure`; but not 401,
407 and redirects.
"""

import re
from abc import ABC, abstractmethod

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptOutcome, OutcomeName
from router.decision.routing import Lease
from router.decision.verdict import Verdict
from router.fleet.breakers import RETRY_AFTER_DEFAULT_S, RETRY_AFTER_S_MAX
from router.http import refusals
from router.http.exchange import UpstreamStage
from router.http.heads import Headers
from router.http.refusals import Refusal
from router.native import built

CLIENT_FAULT, SERVER_FAULT = 400, 500
REDIRECTS = range(300, 400)
_BUSY = frozenset({429, 503})
_REFUSES_US = frozenset({401, 407})
"""The worker refuses the router's token. As it answers fast, it would draw all the load, and all clients would be told
that their keys are wrong."""
_GATEWAY = frozenset({502, 504})
"""Statuses of a proxy that cannot reach the worker: they do not come from the engine."""
_NO_HEADERS: Headers = {}
NO_ANSWER = built.Answer()
"""The counts of an answer that was not completed: none."""
_SECONDS = re.compile(rb"[0-9]{1,6}")


class Attempt(ABC):
    """One try at a request: the answer's status, and the failure, if any."""

    status = 0
    headers = _NO_HEADERS
    """The worker's."""
    lines = b""
    """Header lines that the client's answer gets; each ends by CRLF."""
    stage: UpstreamStage = "first_byte"
    """The step of the call at which the attempt failed, if `reason` says why it did."""
    reason = ""
    retry_after_s: float | None = None
    is_retried = False
    """Whether it failed before its answer, and another worker was asked for."""
    is_success = True
    """No error status so far."""
    has_begun = False
    """Whether a byte of the answer's body came, before its end."""
    is_streamed = False
    """Whether the answer is an event stream; known once its head came."""
    answer = NO_ANSWER

    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank

    @property
    def is_clients(self) -> bool:
        """Whether the client gets the answer of a failed attempt when no other worker is left."""
        return True

    @property
    def end_outcome(self) -> OutcomeName:
        """The outcome of an answer that was passed on completely."""
        if self.reason:
            return "failed"
        return "ok" if self.is_success else "refused"

    @property
    def took_handoff(self) -> bool:
        """Whether the worker of a failed attempt may have fetched the prefill worker's KV."""
        return False

    def on_bytes(self) -> None:  # noqa: B027 - the default
        """Bytes of the answer came."""

    @abstractmethod
    def judge(self, status: int) -> None:
        """Set what a status of 300 or more means: `is_success`, and `reason` if the attempt has failed by it."""

    @abstractmethod
    def refusal(self) -> Refusal:
        """Return the client's error if this failed attempt was the last."""


class RankAttempt(Attempt):
    """A worker rank's attempt: the decision, and the lease of its work."""

    lease: Lease
    """Set where the work is booked."""

    def __init__(self, verdict: Verdict) -> None:
        self.rank, self.verdict = verdict.winner, verdict

    @property
    def outcome(self) -> AttemptOutcome:
        """What the attempt says of the rank's health."""
        if self.stage == "local":
            return "cancelled"
        if self.retry_after_s is not None:
            return "back_pressure"
        if self.reason:
            return "erred" if self.status >= SERVER_FAULT and self.status not in _GATEWAY else "failed"
        return "client_fault" if self.status >= CLIENT_FAULT else "ok"

    @property
    def is_clients(self) -> bool:
        """Whether the client gets the answer of a failed attempt when no other worker is left."""
        return self.status >= CLIENT_FAULT and self.status not in _REFUSES_US

    @property
    def took_handoff(self) -> bool:
        """Whether the worker of a failed attempt may have fetched the prefill worker's KV."""
        return self.stage != "connect" and self.retry_after_s is None

    def on_bytes(self) -> None:
        """Bytes of the answer came: renew the lease."""
        self.lease.on_bytes()

    def judge(self, status: int) -> None:
        """Set what a status of 300 or more means; of a failed attempt, the lines say so."""
        self.is_success = status < CLIENT_FAULT
        if status in _BUSY:
            retry_after = self.headers.get(b"retry-after", b"")
            wanted_s = float(retry_after) if _SECONDS.fullmatch(retry_after) else RETRY_AFTER_DEFAULT_S
            self.retry_after_s = min(wanted_s, RETRY_AFTER_S_MAX)
        if status in _REFUSES_US:
            self.reason = f"status {status}: the worker refuses data.worker_token"
        elif status in _BUSY or status >= SERVER_FAULT or status in REDIRECTS:
            self.reason = f"status {status}"
        if self.reason:
            self.lines += f"x-kv-failure: {self.rank}: {self.reason}; no other worker is left\r\n".encode()

    def refusal(self) -> Refusal:
        """Return 503 for a busy rank, else 502."""
        if self.retry_after_s is not None:
            message = f"worker {self.rank} is busy, and so were the others: {self.stage}: {self.reason}"
            return refusals.unavailable(message, "overloaded", retry_after_s=self.retry_after_s)
        return refusals.worker_failed(self.rank, f"{self.stage}: {self.reason}")
