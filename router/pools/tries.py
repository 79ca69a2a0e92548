"""The phases of a request to pools, and one try at a router of a pool.

| a router | then |
|---|---|
| cannot be reached, is cut off or too slow before its answer; a status of 500 or more, a redirect | the next one |
| the last one does that | the client gets its answer; without one, 502 with the reason |
| answers anything else, a 4xx too | that is the answer |
| fails within its answer | the request is over: it is not retried; a prefill answer is asked of the next one |
| a limit of this process | 503: it says nothing of the router |

The order is that of the plan's pools, and of the routers of each pool that are up. Source: `docs/SOURCES.md` D5.3.
"""

from typing import NamedTuple

from kv_protocol.decided import RequestPhase
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeName
from router.pools.selection import PoolPhase
from router.request.attempt import CLIENT_FAULT, Attempt
from router.request.plan import Phases
from router.request.refusals import Refusal
from router.server.heads import Headers

_SERVER_FAULT = 500
_REDIRECTS = range(300, 400)


class PoolRouter(NamedTuple):
    """A router of a pool."""

    namespace: str
    url: str


class PoolPhases(Phases):
    """The phases of a request; the routers of the present one are tried in turn."""

    __slots__ = ("_at", "_routers")

    def __init__(self, phase: RequestPhase) -> None:
        super().__init__(phase, fixed=False)
        self._at = 0
        self._routers: tuple[PoolRouter, ...] = ()

    def begin(self, routers: tuple[PoolRouter, ...]) -> None:
        """Begin the present phase with these routers, one or more."""
        self._routers, self._at = routers, 0

    @property
    def router(self) -> PoolRouter:
        """The router that is tried next, or now."""
        return self._routers[self._at]

    @property
    def is_last(self) -> bool:
        """Whether no other router is left to try."""
        return self._at + 1 == len(self._routers)

    @property
    def retries(self) -> int:
        """How many routers of this phase have failed."""
        return self._at

    def prefilled(self) -> None:
        """The prompt is computed: decode is next."""
        self.phase = "decode"

    def failed(self, rank: WorkerRank, *, took_handoff: bool) -> bool:  # noqa: ARG002 - the routers' own concern
        """Return whether another router is to be tried."""
        if self.is_last:
            return False
        self._at += 1
        return True


class PoolAttempt(Attempt):
    """A try at a router. `pool_phase` is the phase that its pool is for."""

    __slots__ = ("_is_last", "pool_phase", "retry_after", "router")

    def __init__(self, router: PoolRouter, pool_phase: PoolPhase, *, is_last: bool) -> None:
        super().__init__()
        self.router, self.pool_phase, self._is_last = router, pool_phase, is_last
        self.retry_after = b""

    @property
    def rank(self) -> WorkerRank:
        """The pool, as a rank."""
        return WorkerRank(self.router.namespace, 0)

    @property
    def is_answered(self) -> bool:
        """Whether the router answered with 2xx."""
        return self.status < _REDIRECTS.start

    @property
    def end_outcome(self) -> OutcomeName:
        """The outcome of an answer that was passed on completely, judged by the status."""
        if self.is_answered:
            return "ok"
        return "refused" if CLIENT_FAULT <= self.status < _SERVER_FAULT else "failed"

    def _may_pass(self, headers: Headers) -> bool:
        self.retry_after = headers.get(b"retry-after", b"")
        if self._is_last or not (self.status >= _SERVER_FAULT or self.status in _REDIRECTS):
            return True
        self.reason = f"status {self.status}"
        return False

    def refusal(self) -> Refusal:
        """Return 502: the last router that was tried failed."""
        message = f"pool {self.router.namespace} failed: {self.phase}: {self.reason}"
        return Refusal(502, message, "server_error", code="upstream_failed", outcome="failed")


def of_pool(attempt: Attempt) -> PoolAttempt:
    """Return an attempt that is known to be at a pool."""
    assert isinstance(attempt, PoolAttempt), "requests to pools have no other attempts"
    return attempt
