"""One phase of a request: its pools are tried in turn until one answers.

| a router | then |
|---|---|
| cannot be reached, is cut off or too slow before its answer; a status of 500 or more, a redirect | the next one |
| the last one does that | the client gets its answer; without one, 502 with the reason |
| answers anything else, a 4xx too | that is the answer |
| fails within its answer | the request is over: it is not retried |
| a limit of this process | 503: it says nothing of the router |

The order is that of the plan's pools, and of the routers of each pool that are up. Source: `docs/SOURCES.md` D5.3.
"""

from collections.abc import Callable
from typing import NamedTuple

import structlog

from kv_protocol.body_limits import Bytes
from router.pools.attempts import PoolSequence
from router.pools.metrics import AttemptOutcome
from router.pools.service import PoolService
from router.request import refusals
from router.request.refusals import Refusal
from router.server.exchange import OutboundCall, ResponseHandler, UpstreamStage
from router.server.heads import Headers

_CLIENT_FAULT, _SERVER_FAULT = 400, 500
_REDIRECTS = range(300, 400)

_log = structlog.get_logger("pools")


class Outbound(NamedTuple):
    """The call to every pool of a phase: path, header lines ended by CRLF each, body."""

    path: str
    headers: bytes
    body: bytes | tuple[Bytes | memoryview, ...]
    streamed: bool


class Ended(NamedTuple):
    """The result of a phase: the pool that was tried last, and the status of its answer, 0 without one.

    `refusal`: nothing was passed on, and the client gets this.
    """

    outcome: AttemptOutcome
    namespace: str
    status: int
    retry_after: bytes
    refusal: Refusal | None = None


def pool_failed(namespace: str, reason: str) -> Refusal:
    """Return a refusal: the last pool that was tried failed."""
    message = f"pool {namespace} failed: {reason}"
    return Refusal(502, message, "server_error", code="upstream_failed", outcome="failed")


class PoolPhaseRun:
    """A running phase, the handler of its own calls, which `ask` sends; `ended` is called once with the result.

    `lines`, given a pool, returns the header lines that its answer is passed on with.
    """

    __slots__ = ("_ask", "_at", "_ended", "_lines", "_outbound", "_phase", "_retry_after", "_service", "_status",
                 "_targets")  # fmt: skip

    def __init__(
        self,
        service: PoolService,
        plan: PoolSequence,
        outbound: Outbound,
        ask: Callable[[OutboundCall, ResponseHandler], None],
        lines: Callable[[str], bytes],
        ended: Callable[[Ended], None],
    ) -> None:
        self._service, self._outbound, self._ask, self._lines = service, outbound, ask, lines
        self._ended: Callable[[Ended], None] | None = ended
        self._phase = plan.selection.phase
        self._targets = [(each.namespace, url) for each in plan.order for url in service.routers(each.namespace)]
        self._at = self._status = 0
        self._retry_after = b""
        service.metrics.planned(plan)

    def begin(self) -> None:
        """Ask the next router."""
        self._status, self._retry_after = 0, b""
        url, out = self._targets[self._at][1], self._outbound
        limits = self._service.call_limits(streamed=out.streamed)
        self._ask(OutboundCall(url, out.path, out.headers, out.body, *limits), self)

    @property
    def _is_last(self) -> bool:
        return self._at + 1 == len(self._targets)

    def on_head(self, status: int, headers: Headers) -> bytes | None:
        """Return header lines to add to the answer; None if the next router is to be asked."""
        self._status, self._retry_after = status, headers.get(b"retry-after", b"")
        is_failed = status >= _SERVER_FAULT or status in _REDIRECTS
        return None if is_failed and not self._is_last else self._lines(self._targets[self._at][0])

    def on_dropped(self) -> None:
        """The unwanted answer is dropped."""
        self._next(f"status {self._status}")

    def on_first_byte(self) -> None:
        """The answer has begun."""

    def on_bytes(self) -> None:
        """The answer goes on."""

    def on_end(self, tail: bytes, later_events: int) -> None:  # noqa: ARG002 - passed on, unread
        """The complete answer was passed on."""
        if self._status < _REDIRECTS.start:
            self._end("ok")
        else:
            self._end("refused" if _CLIENT_FAULT <= self._status < _SERVER_FAULT else "failed")

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:  # noqa: ARG002 - `on_failed` says it
        """Return None: the stream ends."""
        return None

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The router failed. The next one is asked, unless the client has part of this one's answer."""
        namespace, url = self._targets[self._at]
        if phase == "local":
            self._end("cancelled", refusals.unavailable(reason, "overloaded"))
            return
        if phase == "connect":
            self._service.attempt_failed(namespace, url, reason)
        if begun:
            self._tell(reason)
            self._end("failed")
        elif self._is_last:
            self._tell(reason)
            self._end("failed", pool_failed(namespace, f"{phase}: {reason}"))
        else:
            self._next(f"{phase}: {reason}")

    def on_gone(self) -> None:
        """The client left."""
        self._end("cancelled")

    def _next(self, reason: str) -> None:
        self._tell(reason)
        self._service.metrics.attempted(self._phase, self._targets[self._at][0], "failed")
        self._at += 1
        self.begin()

    def _tell(self, reason: str) -> None:
        namespace, url = self._targets[self._at]
        _log.warning("pool_failed", phase=self._phase, pool=namespace, url=url, reason=reason)

    def _end(self, outcome: AttemptOutcome, refusal: Refusal | None = None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            namespace = self._targets[self._at][0]
            self._service.metrics.attempted(self._phase, namespace, outcome)
            ended(Ended(outcome, namespace, self._status, self._retry_after, refusal))
