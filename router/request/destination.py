"""The interfaces that `request.py` calls: a destination, which serves requests, and an attempt, which is one try there.

the workers of a fleet    `serving.py`
pools                     `router/pools/served.py`
the cache of a worker     `router/drain/warming.py`
a fleet behind a gateway  `serving.py` too; the gateway sends the requests (`Gateway`, `router/endpoint_picker/`)

What the end of an attempt shows about the health of a worker rank:

| the attempt ended with | outcome |
|---|---|
| an answer (none of those below) | ok; client_fault if the worker refused the request (4xx) |
| 401, 407 | failed: the worker refused the router's token; clients' tokens are never passed on |
| 429, 503 | back_pressure: the rank gets no requests until its `Retry-After` has passed |
| another status of 500 or more | erred: possibly the request's fault |
| a limit of the router (sockets, dials), or a `Move` that is no fault | cancelled: it says nothing of the worker |
| 502, 504, a redirect, no connection, cut off, too slow | failed |

If no other worker is left, a failed answer is passed on unchanged, except 401, 407 and redirects. Its reason is in the
header `x-kv-failure`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kv_protocol.decision import Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptOutcome, OutcomeName
from router.decision.routing import Lease
from router.decision.verdict import Verdict
from router.fleet.breakers import RETRY_AFTER_DEFAULT_S, RETRY_AFTER_S_MAX
from router.http import refusals
from router.http.exchange import OutboundCall, UpstreamStage
from router.http.heads import Headers
from router.http.refusals import Refusal
from router.http.stream_replay import StreamReplayBuffer
from router.native import built

if TYPE_CHECKING:
    from router.request.request import Request

CLIENT_FAULT, SERVER_FAULT = 400, 500
REDIRECTS = range(300, 400)
_BUSY = frozenset({429, 503})
_REFUSES_US = frozenset({401, 407})
"""Else the worker would draw all the load, as it answers fast, and clients would be told that their keys are wrong."""
_GATEWAY = frozenset({502, 504})
"""Statuses of a proxy that cannot reach the worker: they do not come from the engine."""
_NO_HEADERS: Headers = {}
NO_ANSWER = built.Answer()
"""The `answer` of an attempt until its answer is complete: no counts are known."""
_SECONDS = re.compile(rb"[0-9]{1,6}")


class Attempt(ABC):
    """One try at a request: the answer's status, and the failure, if any."""

    status = 0
    headers = _NO_HEADERS
    """Headers of the worker's answer."""
    lines = b""
    """Header lines that the client's answer gets; each ends by CRLF."""
    stage: UpstreamStage = "first_byte"
    """Where the attempt failed. Without meaning while `reason` is empty, unless it is "local"."""
    reason = ""
    is_at_fault = True
    """Whether a failure counts against the worker."""
    retry_after_s: float | None = None
    is_retried = False
    """Whether the attempt failed before its answer, and the router looked for another worker."""
    is_success = True
    """Whether the answer has no error status so far."""
    has_begun = False
    """Whether a byte of the answer's body came before the answer was complete."""
    is_streamed = False
    """Whether the answer is an event stream; known once its head came."""
    answer = NO_ANSWER
    replay_buffer: StreamReplayBuffer | None = None
    """The call's buffer; None: no other worker can continue the answer."""

    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank

    @property
    def is_passed_on(self) -> bool:
        """Whether the client gets the answer of a failed attempt when no other worker is left."""
        return True

    @property
    def end_outcome(self) -> OutcomeName:
        """The outcome of an attempt whose answer came to its end."""
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
    """Set when the work is booked."""

    def __init__(self, verdict: Verdict) -> None:
        self.rank, self.verdict = verdict.winner, verdict

    @property
    def outcome(self) -> AttemptOutcome:
        """What the attempt shows about the rank's health."""
        if self.stage == "local" or not self.is_at_fault:
            return "cancelled"
        if self.retry_after_s is not None:
            return "back_pressure"
        if self.reason:
            return "erred" if self.status >= SERVER_FAULT and self.status not in _GATEWAY else "failed"
        return "client_fault" if self.status >= CLIENT_FAULT else "ok"

    @property
    def is_passed_on(self) -> bool:
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
        """Set what a status of 300 or more means; if the attempt has failed by it, `lines` say so."""
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
        message = f"worker {self.rank} failed: {self.stage}: {self.reason}"
        return Refusal(502, message, code="upstream_failed", outcome="failed")


class Move(NamedTuple):
    """Why a request leaves a worker that did not fail. `is_fault`: the move counts as the worker's failure."""

    reason: str
    is_fault: bool


A = TypeVar("A", bound=Attempt)


class Destination(ABC, Generic[A]):
    """Serves requests. First the methods that find a worker, then those that find another, then those that record."""

    __slots__ = ()
    is_bounded = False
    """Whether a request may have to wait for `admitted`."""

    @abstractmethod
    def read(self, request: "Request[A]") -> Coroutine[Any, Any, None]:
        """Set the request's body, prompt, route and plan. It is not run as a task: await futures by `Request.later`.

        Raises:
            RequestInvalid, TextError, EncodersBusy, RequestRejected: it cannot be served.
        """

    async def admitted(self, request: "Request[A]") -> None:
        """Return once the request may go on; raise `RequestRejected` if it may not."""

    def routed(self, request: "Request[A]", pinned: str | None = None) -> None:
        """Set the route for the present phase of the plan, with a new decision id. `pinned`: the only worker."""

    @abstractmethod
    def choose(self, request: "Request[A]") -> A:
        """Choose a worker for the present phase, and book the work there.

        Raises:
            NoEligibleWorker: for this phase; another one is tried, if the plan has one.
            WorkerNotNamed, RequestRejected: the request is refused.
        """

    @abstractmethod
    def call(self, request: "Request[A]", attempt: A) -> OutboundCall:
        """Return the call to the chosen worker, and set the attempt's `lines`; raise `CannotResume`."""

    def fetching_call(self, request: "Request[A]") -> OutboundCall | None:  # noqa: ARG002 - the default
        """The client left: return the call by which a decode worker fetches the KV of `request.handoff`, if any."""
        return None

    def has_other(self, request: "Request[A]") -> bool:  # noqa: ARG002 - the default
        """Return whether another worker can serve the request."""
        return True

    def reason_to_move(self, attempt: A, quiet_s: float, *, begun: bool) -> Move | None:  # noqa: ARG002 - the default
        """Return why a request is to leave a worker that has not failed; None: it stays.

        `quiet_s`: seconds since the answer's last byte. `begun`: the client has part of the answer.
        """
        return None

    def pause_s(self, request: "Request[A]") -> float:  # noqa: ARG002 - the default
        """Return for how many seconds to wait before the request is sent to another worker after a failure."""
        return 0.0

    # ------------------------------------------------------------------------------------------- what is recorded

    def unserved(self, request: "Request[A]", exclusions: tuple[Exclusion, ...]) -> None:
        """The request is refused because no worker is eligible."""

    def began(self, request: "Request[A]", attempt: A) -> None:
        """The answer's first byte came, so the worker has computed the prompt."""

    @abstractmethod
    def settle(self, request: "Request[A]", attempt: A, outcome: OutcomeName) -> None:
        """An attempt is over; `request.attempts` has those before it. If `request.is_over`, it was the last."""

    @abstractmethod
    def ended(self, request: "Request[A]", outcome: OutcomeName, refusal: Refusal | None) -> None:
        """The request is over, and all of its attempts are settled."""


class Gateway(NamedTuple):
    """A gateway that sends a request itself: once, and to one worker, the chosen one or an alternative."""

    allowed_workers: frozenset[str] | None
    """Ids of the workers that the gateway can reach, and offers; None: all."""
    alternatives: Callable[[Verdict], tuple[str, ...]]
    """Returns base URLs of other workers that may take the same call, best first."""
