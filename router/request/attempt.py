"""One attempt of a rank to serve a request, and what its end says about the rank's health.

| the worker | outcome |
|---|---|
| answered | ok; client_fault where it refused the request (4xx) |
| 401, 407 | failed: it refused the router's token; clients' tokens are never passed on |
| 429, 503 | back_pressure: it gets no requests for its `Retry-After` |
| another status of 500 or more | erred: possibly the request's fault |
| a limit of the router (sockets, dials) | cancelled: it says nothing of the worker |
| 502, 504, a redirect, no connection, cut off, too slow | failed |
"""

from collections.abc import Callable

from kv_protocol.decode_time import DECODE_HEADER, decode_seconds
from kv_protocol.journal import AttemptOutcome
from router.decision.routing import Lease
from router.decision.verdict import Verdict
from router.request.latency import Arrival
from router.server.exchange import UpstreamStage
from router.server.heads import Headers

CLIENT_FAULT, SERVER_FAULT = 400, 500
_BUSY = frozenset({429, 503})
_REFUSES_US = frozenset({401, 407})
"""Such a worker answers fast: it would draw all the load, and all clients would be told that their keys are wrong."""
_REDIRECTS = range(300, 400)
_GATEWAY = frozenset({502, 504})
"""Statuses of a proxy that cannot reach the worker: they do not come from the engine."""
_DECODE_HEADER = DECODE_HEADER.encode()
_STREAM = b"text/event-stream"


class Attempt:
    """One rank's attempt at a request: the decision, its lease, and the failure, if any."""

    __slots__ = ("_decode_ms", "is_streamed", "lease", "phase", "reason", "retry_after_s", "status", "verdict")

    phase: UpstreamStage
    """Where it failed, if it did. `reason` is empty if it did not."""

    def __init__(self, verdict: Verdict, lease: Lease) -> None:
        self.verdict, self.lease = verdict, lease
        self.status = 0
        self.phase = "first_byte"
        self.reason = ""
        self.retry_after_s: float | None = None
        self.is_streamed = False
        """Whether the answer is an event stream; known once its head came."""
        self._decode_ms = b""

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

    def arrival(self, later_tokens: int) -> Arrival:
        """Return how the ended answer arrived; `later_tokens` as of `Arrival`."""
        if self.is_streamed:
            return Arrival(is_streamed=True, later_tokens=later_tokens)
        if self.is_answered and self.verdict.request.phase == "prefill":  # it ends with its first token
            return Arrival(is_streamed=False, later_tokens=0, decode_s=0.0)
        decode_s = decode_seconds(self._decode_ms) if self._decode_ms else None
        return Arrival(is_streamed=False, later_tokens=later_tokens, decode_s=decode_s)

    def on_status(self, status: int, headers: Headers, busy_s: Callable[[bytes], float]) -> bool:
        """The answer's head came; return whether it may be passed on.

        `busy_s` reads from a busy worker's `retry-after` for how many seconds it gets no requests.
        """
        self.status = status
        self.is_streamed = headers.get(b"content-type", b"")[: len(_STREAM)].lower() == _STREAM
        self._decode_ms = headers.get(_DECODE_HEADER, b"")
        if status < _REDIRECTS.start:
            return True
        if status in _BUSY:
            self.retry_after_s = busy_s(headers.get(b"retry-after", b""))
        if status in _REFUSES_US:
            self.reason = f"status {status}: the worker refuses data.worker_token"
        elif status in _BUSY or status >= SERVER_FAULT or status in _REDIRECTS:
            self.reason = f"status {status}"
        return not self.reason

    @property
    def is_answered(self) -> bool:
        """Whether the client got what it asked for, judged by the status."""
        return self.status < CLIENT_FAULT
