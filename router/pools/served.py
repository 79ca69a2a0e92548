"""Where requests to pools go: a router of a pool, for each phase in turn.

    agg      read -> pools selected -> forwarded
             likewise in disagg where one token is all: to the decode pool
    disagg   read -> pools selected -> prefill, collected -> decode, forwarded
                                             `- complete after its first token: answered with that

| a router | then |
|---|---|
| cannot be reached, is cut off or too slow before its answer; a status of 500 or more, a redirect | the next one |
| the last one does that | the client gets its answer; without one, 502 with the reason |
| answers anything else, a 4xx too | that is the answer |
| fails within its answer | the request is over: it is not retried; a prefill answer is asked of the next one |
| a limit of this process | 503: it says nothing of the router |

The order is that of the phase's pools, and of the routers of each pool that are up. Source: `docs/SOURCES.md` D5.3. The
prefill answer goes on to the decode pool as TensorRT-LLM's servers pass it on (`router/request/handoff.py`).

| header of the answer | says |
|---|---|
| `x-request-id` | the client's, or a new one |
| `x-pool`, `x-prefill-pool` | the namespaces of the pools that served it; of a final prefill answer the latter alone |
"""

from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeName
from router.decision.plan import first_plan
from router.http.exchange import OutboundCall
from router.http.refusals import Refusal
from router.pools.attempts import PoolSequence
from router.pools.reader import PoolQuestion, pool_question, prompt_of
from router.pools.selection import PoolPhase
from router.pools.service import PoolService, sent_on
from router.request.attempt import REDIRECTS, SERVER_FAULT, Attempt
from router.request.destination import Destination, RequestRecords
from router.request.handoff import CONTEXT_AND_GENERATION, decode_body, prefill_body
from router.request.request import Request

if TYPE_CHECKING:
    from kv_protocol.decided import RequestPhase

_log = structlog.get_logger("pools")


class PoolAttempt(Attempt):
    """A try at a router of a pool. `pool_phase` is the phase that its pool is for."""

    def __init__(self, namespace: str, url: str, pool_phase: PoolPhase) -> None:
        super().__init__(WorkerRank(namespace, 0))
        self.url, self.pool_phase = url, pool_phase

    @property
    def namespace(self) -> str:
        """The pool."""
        return self.rank.worker_id

    def may_pass(self, status: int) -> bool:
        """Judge a status of 300 or more; a prefill router's answer says when it is free."""
        self.is_success = False
        if self.pool_phase == "prefill" and (retry_after := self.headers.get(b"retry-after")):
            self.lines += b"retry-after: %b\r\n" % retry_after
        if status >= SERVER_FAULT or status in REDIRECTS:
            self.reason = f"status {status}"
        return not self.reason

    def refusal(self) -> Refusal:
        """Return 502: the last router that was tried failed."""
        message = f"pool {self.namespace} failed: {self.stage}: {self.reason}"
        return Refusal(502, message, "server_error", code="upstream_failed", outcome="failed")


class Pools(Destination[PoolAttempt], RequestRecords[PoolAttempt]):
    """The pools of one request."""

    __slots__ = ("_phase", "_question", "_routers", "_sequences", "_service")

    _question: PoolQuestion

    def __init__(self, service: PoolService) -> None:
        self._service = service
        self._sequences: tuple[PoolSequence, ...] = ()
        """The pools of each phase."""
        self._phase = ""
        """The one whose routers are tried."""
        self._routers: tuple[tuple[str, str], ...] = ()
        """Its namespaces and URLs, in the order of trial."""

    # ------------------------------------------------------------------------------------------- until it is sent

    async def read(self, request: Request[PoolAttempt]) -> None:
        """Set the request's body, prompt and plan, and select the pools; raise `RequestInvalid`.

        The prompt is None if its length is not read, is known, or has to be estimated.
        """
        service, exchange = self._service, request.exchange
        read = await request.later(service.bodies.read(exchange.path, exchange.body))
        request.body, request.inbound = body, inbound = read
        request.model = inbound.model
        made = prompt_of(service, inbound, body)
        prompt = request.prompt = None
        if made is not None:
            request.prompt = prompt = await request.later(made)
        request.route, self._question = pool_question(service, inbound, exchange.headers, prompt)
        self._sequences = service.plans(self._question.asked, one_token=inbound.limit_tokens == 1)
        phase: RequestPhase = "whole" if service.config.mode == "agg" else "alone"
        if len(self._sequences) > 1:
            phase = "prefill"
        request.plan = first_plan(phase, retry_limit=0, falls_back=False)
        self.routed(request)

    def selected(self) -> dict[str, object]:
        """Return what the pools were selected by, and the pools, for people."""
        return {"question": self._question, "phases": self._sequences}

    def routed(self, request: Request[PoolAttempt], pinned: str | None = None) -> None:  # noqa: ARG002 - no gateway
        """Find the routers of the plan's phase, where it is a new one."""
        if request.plan.phase != self._phase:
            self._phase, routers = request.plan.phase, self._service.routers
            order = self._sequence.order
            self._routers = tuple((pool.namespace, url) for pool in order for url in routers(pool.namespace))
            request.plan = replace(request.plan, retry_limit=len(self._routers) - 1)

    @property
    def _sequence(self) -> PoolSequence:
        """The pools of the present phase."""
        return self._sequences[0 if self._phase == "prefill" else -1]

    def choose(self, request: Request[PoolAttempt]) -> PoolAttempt:
        """Return a try at the next router."""
        plan = request.plan
        if not plan.retries:
            self._service.metrics.planned(self._sequence)
        return PoolAttempt(*self._routers[plan.retries], self._sequence.selection.phase)

    def call(self, request: Request[PoolAttempt], attempt: PoolAttempt) -> OutboundCall:
        """Return the call to the router."""
        text, body, handoff, to_prefill = request.body.text, request.body, request.handoff, self._phase == "prefill"
        if to_prefill:
            text = prefill_body(text)
        elif self._phase == "alone":
            text = decode_body(text, CONTEXT_AND_GENERATION)
        elif handoff is not None:
            text = decode_body(text, handoff.params, handoff.prompt_ids)
        sent = text if isinstance(text, bytes) and not body.images else body.with_images(text)
        headers = sent_on(request.exchange.headers, self._question.request_id, to_prefill=to_prefill)
        limits = self._service.call_limits(streamed=bool(request.inbound.stream) and not to_prefill)
        attempt.lines = self._lines(request, attempt)
        return OutboundCall(attempt.url, request.inbound.path, headers, sent, limits)

    def _lines(self, request: Request[PoolAttempt], attempt: PoolAttempt) -> bytes:
        """Return the header lines that say which pools served the request."""
        lines, pool = b"x-request-id: %b\r\n" % self._question.request_id.encode(), attempt.namespace.encode()
        if self._phase == "prefill":
            return b"%bx-prefill-pool: %b\r\n" % (lines, pool)
        if request.prefilled_by is not None:
            lines = b"x-prefill-pool: %b\r\n%b" % (request.prefilled_by.worker_id.encode(), lines)
        return b"%bx-pool: %b\r\n" % (lines, pool)

    # ------------------------------------------------------------------------------------------- the answer

    def lost(self, attempt: PoolAttempt, quiet_s: float, *, begun: bool) -> str:  # noqa: ARG002 - as of `Destination`
        """Return why the router's answer is not awaited before it began: it is silent."""
        is_silent = not begun and self._service.live.is_silent(attempt.namespace, attempt.url)
        return "the router is silent" if is_silent else ""

    def settle(self, request: Request[PoolAttempt], attempt: PoolAttempt, outcome: OutcomeName) -> None:  # noqa: ARG002
        """A router's part is over."""
        service, is_local = self._service, attempt.stage == "local"
        service.metrics.attempted(attempt.pool_phase, attempt.namespace, "cancelled" if is_local else outcome)
        if is_local or not attempt.reason:
            return
        if attempt.stage == "connect":
            service.attempt_failed(attempt.namespace, attempt.url, attempt.reason)
        reason = f"{attempt.stage}: {attempt.reason}"
        _log.warning("pool_failed", phase=attempt.pool_phase, pool=attempt.namespace, url=attempt.url, reason=reason)

    def ended(
        self,
        request: Request[PoolAttempt],  # noqa: ARG002 - as of `Destination`
        outcome: OutcomeName,
        refusal: Refusal | None,  # noqa: ARG002
    ) -> None:
        """The request is over."""
        self._service.metrics.ended(outcome)
