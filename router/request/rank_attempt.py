"""One attempt of a rank to serve a request, and what its end says about a worker rank's health.

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

from kv_protocol.decode_time import DECODE_HEADER, decode_seconds
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptOutcome
from router.decision.routing import Lease
from router.decision.verdict import Verdict
from router.request import refusals
from router.request.attempt import CLIENT_FAULT, Attempt
from router.request.latency import Arrival
from router.request.refusals import Refusal
from router.server.heads import Headers

SERVER_FAULT = 500
_BUSY = frozenset({429, 503})
_REFUSES_US = frozenset({401, 407})
"""Such a worker answers fast: it would draw all the load, and all clients would be told that their keys are wrong."""
_REDIRECTS = range(300, 400)
_GATEWAY = frozenset({502, 504})
"""Statuses of a proxy that cannot reach the worker: they do not come from the engine."""
_DECODE_HEADER = DECODE_HEADER.encode()
_SECONDS = re.compile(rb"[0-9]{1,6}")
_BUSY_S = 1.0
"""How long a busy worker that does not say so gets no requests."""


class RankAttempt(Attempt):
    """A worker rank's attempt: the decision, and the lease of its work."""

    __slots__ = ("_decode_ms", "_retry_after_s_max", "lease", "verdict")

    def __init__(self, verdict: Verdict, lease: Lease, retry_after_s_max: float) -> None:
        """`retry_after_s_max` bounds the time for which a busy worker gets no requests."""
        super().__init__()
        self.verdict, self.lease = verdict, lease
        self._retry_after_s_max = retry_after_s_max
        self._decode_ms = b""

    @property
    def rank(self) -> WorkerRank:
        """The winner."""
        return self.verdict.winner

    @property
    def outcome(self) -> AttemptOutcome:
        """What the attempt says of the rank's health."""
        if self.phase == "local":
            return "cancelled"
        if self.retry_after_s is not None:
            return "back_pressure"
        if self.reason:
            return "erred" if self.status >= SERVER_FAULT and self.status not in _GATEWAY else "failed"
        return "client_fault" if self.status >= CLIENT_FAULT else "ok"

    @property
    def is_engines_word(self) -> bool:
        """Whether a failed answer may be passed on when no other worker is left."""
        return self.status >= CLIENT_FAULT and self.status not in _REFUSES_US

    def arrival(self, later_tokens: int | None) -> Arrival:
        """Return how the ended answer arrived; `later_tokens` as of `Arrival`, None if it was not completed."""
        if self.is_streamed or later_tokens is None:
            return Arrival(is_streamed=self.is_streamed, later_tokens=later_tokens or 0)
        if self.is_answered and self.verdict.request.phase == "prefill":  # it ends with its first token
            return Arrival(is_streamed=False, later_tokens=0, decode_s=0.0)
        decode_s = decode_seconds(self._decode_ms) if self._decode_ms else None
        return Arrival(is_streamed=False, later_tokens=later_tokens, decode_s=decode_s)

    def _may_pass(self, headers: Headers) -> bool:
        status = self.status
        self._decode_ms = headers.get(_DECODE_HEADER, b"")
        if status < _REDIRECTS.start:
            return True
        if status in _BUSY:
            self.retry_after_s = self._busy_s(headers.get(b"retry-after", b""))
        if status in _REFUSES_US:
            self.reason = f"status {status}: the worker refuses data.worker_token"
        elif status in _BUSY or status >= SERVER_FAULT or status in _REDIRECTS:
            self.reason = f"status {status}"
        return not self.reason

    def _busy_s(self, retry_after: bytes) -> float:
        """Return for how many seconds a busy worker gets no requests."""
        wanted_s = float(retry_after) if _SECONDS.fullmatch(retry_after) else _BUSY_S
        return min(wanted_s, self._retry_after_s_max)

    def refusal(self) -> Refusal:
        """Return 503 for a busy rank, else 502."""
        if self.retry_after_s is not None:
            message = f"worker {self.rank} is busy, and so were the others: {self.phase}: {self.reason}"
            return refusals.unavailable(message, "overloaded", retry_after_s=self.retry_after_s)
        return refusals.worker_failed(self.rank, f"{self.phase}: {self.reason}")


def of_rank(attempt: Attempt) -> RankAttempt:
    """Return an attempt that is known to be a rank's."""
    assert isinstance(attempt, RankAttempt), "requests at ranks have no other attempts"
    return attempt
