"""One request on the router's side in virtual time: as `router/request/request.py` has it, without bytes.

    planned    `RequestPlan`, of the roles that are fit; `placement` where the layout is conditional
    decided    `Routing.decide` for the phase, and a lease at the winner; no candidate: as the plan has it
    output     prefill: the handoff, and a decision for the decode worker; or the end, where one token was requested
               an error: the plan again, after a pause; or the end

The queue is off, as it is by default, and no request migrates: engines here fail requests, and never die.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec.structs import replace

from bench.routing.trace import TraceRequest
from bench.routing.virtual_fleet import RequestFigures
from kv_protocol.decided import RequestPhase, RouteRequest
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptEnded, AttemptOutcome, OutcomeName
from router.decision.disaggregation import ConditionalLimits, placement
from router.decision.errors import NoEligibleWorker
from router.decision.plan import RequestPlan, first_phase
from router.decision.routing import Lease, Routing
from worker_agent.port.types import EngineOutput

if TYPE_CHECKING:
    from worker_agent.port.handoff import Handoff

RETRY_LIMIT = 2
"""The router's default, `failures.retry_limit`."""
_BACK_OFF_S = 0.02
"""Before the first retry, twice as long before each that follows; the router's own, without its jitter."""

Next = Literal["wait", "decide", "again", "answered", "failed"]
"""`decide` continues at once, `again` after `pause_s`."""


class JourneyAnswer(NamedTuple):
    """The outcome of an answered request; `phase` is the last one that was requested."""

    outcome: RequestFigures
    phase: RequestPhase
    handover_s: float | None
    """From the prefill worker's answer to the client's first token; None where one worker did all of it."""
    retries: int


class Router(NamedTuple):
    """What all requests share: decisions, when a prompt is computed where it is decoded, and names for decisions."""

    routing: Routing
    limits: ConditionalLimits
    new_id: Callable[[], str]


class Journey:
    """One request from its arrival to its end. `decide` chooses the next worker, `on_output` processes its outputs."""

    def __init__(self, router: Router, request: TraceRequest, route_request: RouteRequest) -> None:
        self.request = request
        self._router, self._route_request = router, route_request
        self._domain: str | None = None
        self._lease: Lease | None = None
        self.route, self.rank = route_request, WorkerRank("", 0)
        self.handoff: Handoff | None = None
        self._cached_tokens = self._predicted_tokens = 0
        self._first_s: float | None = None
        self._prefilled_s: float | None = None
        self._erred_at: tuple[WorkerRank, ...] = ()
        routing = router.routing
        roles = routing.state.model_view(route_request.model, *route_request.hashing, routing.clock.now()).roles
        self.plan = RequestPlan(first_phase(roles, may_split=True), retry_limit=RETRY_LIMIT)
        self._prefer_local()

    def _prefer_local(self) -> None:
        limits, plan = self._router.limits, self.plan
        if limits.policy == "off" or plan.phase != "prefill":
            return
        try:
            local_verdict = self._router.routing.decide(self._route_of(plan.beside("alone")))
        except NoEligibleWorker:
            return
        if placement(local_verdict, limits).is_local:
            plan.compute_at_decode()

    def _route_of(self, plan: RequestPlan) -> RouteRequest:
        return replace(
            self._route_request,
            phase=plan.phase,
            tried=plan.tried,
            decision_id=self._router.new_id(),
            transfer_domain=self._domain if plan.phase == "decode" else None,
        )

    def decide(self) -> bool:
        """Promise the next phase to `rank`, under the name of `route`; return False where no worker is eligible."""
        routing = self._router.routing
        while True:
            self.route = self._route_of(self.plan)
            try:
                verdict = routing.decide(self.route)
                break
            except NoEligibleWorker:
                if not self.plan.no_candidate():
                    return False
        self._lease, self.rank = routing.take(verdict), verdict.winner
        if self.route.phase != "decode":
            reusable_blocks = min(verdict.overlap_blocks, self.route.reusable_blocks)
            self._predicted_tokens = reusable_blocks * self.route.block_size
        return True

    @property
    def pause_s(self) -> float:
        """How long to wait after an error, in seconds."""
        return _BACK_OFF_S * float(2 ** (max(1, self.plan.retries) - 1))

    def on_output(self, output: EngineOutput) -> Next:
        """Return the next step after this output of the engine."""
        lease = self._lease
        assert lease is not None
        if output.finish_reason == "error":
            return self._failed()
        if self.plan.phase == "prefill":
            return self._prefilled(output)
        lease.on_bytes()
        if self._first_s is None:
            self._first_s = self._router.routing.clock.now()
        if output.finish_reason is None:
            return "wait"
        if self.plan.phase != "decode":
            self._cached_tokens = output.cached_tokens
        self._end("ok", "ok", output.cached_tokens, self.request.osl_tokens)
        return "answered"

    def _prefilled(self, output: EngineOutput) -> Next:
        now_s, lease = self._router.routing.clock.now(), self._lease
        assert lease is not None
        lease.first_token()
        self._cached_tokens = output.cached_tokens
        self._end("ok", "ok", output.cached_tokens, 1)
        if self.request.osl_tokens == 1:  # the answer is complete: there is no decode phase
            self._first_s = now_s
            return "answered"
        worker = self._router.routing.state.fleet.worker(self.rank.worker_id)
        self._domain = None if worker is None else worker.registration.transfer_domain
        self.handoff, self._prefilled_s = output.handoff, now_s
        self.plan.prefilled()
        return "decide"

    def _failed(self) -> Next:
        """Handle a worker's 500, which the router gets before the client has a byte."""
        self._erred_at = (*self._erred_at, self.rank)
        self._end("failed", "erred")
        return "again" if self.plan.failed(self.rank, took_handoff=True) else "failed"

    def _end(
        self,
        outcome: OutcomeName,
        attempt: AttemptOutcome,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        lease, routing = self._lease, self._router.routing
        assert lease is not None
        lease.end(outcome, cached_tokens, output_tokens)
        if attempt == "ok" and not self._erred_at and routing.state.breakers.are_all_closed:
            return
        routing.apply(
            AttemptEnded(
                now_s=routing.clock.now(),
                worker_id=self.rank.worker_id,
                dp_rank=self.rank.dp_rank,
                outcome=attempt,
                phase="" if attempt == "ok" else "first_byte",
                decision_id=self.route.decision_id,
                erred_before=self._erred_at if attempt == "ok" else (),
            )
        )

    def answer(self, worker: int, now_s: float) -> JourneyAnswer:
        """Return the outcome of the request, answered last by `worker` at `now_s`."""
        request, first_s = self.request, self._first_s
        assert first_s is not None
        outcome = RequestFigures(
            arrival_s=request.arrival_s,
            worker=worker,
            isl_tokens=request.isl_tokens,
            osl_tokens=request.osl_tokens,
            cached_tokens=self._cached_tokens,
            predicted_tokens=self._predicted_tokens,
            ttft_s=first_s - request.arrival_s,
            e2e_s=now_s - request.arrival_s,
        )
        prefilled_s = self._prefilled_s
        handover_s = None if prefilled_s is None or self.route.phase != "decode" else first_s - prefilled_s
        return JourneyAnswer(outcome, self.route.phase, handover_s, len(self._erred_at))
