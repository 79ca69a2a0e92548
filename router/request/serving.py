"""Serves clients' requests at the workers of the fleet: admission and decisions, joined with the other parts."""

from collections.abc import Callable

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kv_protocol.journal import JournalRecord, PolicyChanged
from kv_protocol.openai.requests import Inbound
from kv_protocol.splitmix import unit_interval
from router.config import RouterSettings
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed, exclusions
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.fleet.registry import SILENT_S
from router.http import refusals
from router.http.exchange import Exchange, OutboundCall
from router.http.refusals import Refusal, RequestRejected
from router.metrics import RequestMetrics
from router.prompt.chains import KeptPrompts, RecentPrompt, RecentPrompts
from router.prompt.engine_parity import ASKED
from router.prompt.prompts import ModelPrompts
from router.queue.gate import Admission
from router.queue.tenants import TenantNames
from router.request.calls import Calls
from router.request.destination import Gateway, Move, RankAttempt
from router.request.reading import FleetReader
from router.request.records import FleetRecords
from router.request.replies import refusal_of
from router.request.request import Request
from router.request.resumption import CannotResume
from router.request.tracing import RequestTrace, Tracer

_BACK_OFF_S = 0.02
"""Mean pause before the first retry; it doubles with each further one."""

FleetRequest = Request[RankAttempt]


class Serving(FleetReader, Calls, FleetRecords):
    """Serves requests at workers: the part that admits and decides, joined with those that read, call and record."""

    def __init__(
        self,
        routing: Routing,
        prompts: ModelPrompts,
        admission: Admission,
        metrics: RequestMetrics,
        tenants: TenantNames,
        settings: RouterSettings,
        new_id: Callable[[], str],
        recent: RecentPrompts | None = None,
        *,
        kept: KeptPrompts | None = None,
        sample: Callable[[Inbound, str], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`recent` and `kept` get the prompts of requests, `sample` each `ASKED`th request and its worker's id.

        `tracer` is None if tracing is off.
        """
        FleetReader.__init__(self, routing, prompts, metrics, tenants, settings, new_id)
        Calls.__init__(self, settings, prompts.detokenizer)
        FleetRecords.__init__(self, routing, admission, metrics, settings.telemetry.request_log_ratio)
        self._sample, self._tracer = sample, tracer
        self._inflight_max = settings.queue.inflight_requests_max
        self._recent, self._kept = recent, kept
        routing.records.append(self.record)
        self.follow_policy()

    def serve(self, exchange: Exchange, mode: str = "", gateway: Gateway | None = None) -> "FleetRequest | None":
        """Serve a request and return it; None: it is refused for lack of capacity, or by its account's limits.

        `mode` names the mode in metrics and logs; empty: the mode in force.
        """
        metrics = self.metrics
        if metrics.inflight >= self._inflight_max:
            metrics.count("rejected", "inflight_requests_max")
            message = f"queue.inflight_requests_max: {self._inflight_max} requests are being served; try again"
            self.refuse(exchange, refusals.unavailable(message, "overloaded"))
            return None
        if exchange.account is not None and (refusal := exchange.account.refusal(self._now())) is not None:
            metrics.count("rejected", refusal.param or "")
            self.refuse(exchange, refusal)
            return None
        metrics.inflight += 1
        request: FleetRequest = Request(exchange, self, mode or self._state.policy.mode)
        if gateway is not None:
            request.gateway = gateway
        if self._tracer is not None:
            request.trace = RequestTrace(self._tracer, exchange.headers, exchange.began_s)
        request.run(request.live())
        return request

    # ------------------------------------------------------------------------------------------- admission

    def record(self, what: JournalRecord) -> None:
        """Follow a policy that changed. As one of `Routing.records`, this gets each record that is applied."""
        if type(what) is PolicyChanged:
            self.follow_policy()

    def follow_policy(self) -> None:
        """A policy is in force: read what it needs, and have requests wait as it says."""
        super().follow_policy()
        self.is_bounded = self._admission.is_bounded(self._state.policy)
        self._admission.poke()  # if none has to wait any more, those that wait go on before newer ones

    async def admitted(self, request: FleetRequest) -> None:
        """Return once the request may go on, perhaps after a wait; raise `RequestRejected` if it may not."""
        if self._admission.admits(request.route):
            return
        request.place = self._admission.wait(request.route, request.resume)
        refusal: Refusal | None = await request.until_resumed()
        place, request.place = request.place, None
        if place is not None or refusal is None:  # not if the queue was full: the request was never in it
            self.left_queue(request, self._now() if place is None else place.arrived_s)
        if refusal is not None:
            self.metrics.count("rejected", refusal.code or "")
            raise RequestRejected(refusal)

    # ------------------------------------------------------------------------------------------- deciding

    def routed(self, request: FleetRequest, pinned: str | None = None) -> None:
        """Set the route for the present phase of the plan, with a new decision id. `pinned`: the only worker."""
        request.route = self.route_of(request, request.plan)
        if pinned is not None:
            request.route = replace(request.route, pinned_worker=pinned)

    def decide(self, request: FleetRequest) -> Verdict:
        """Return the decision for the present phase, without a trace of it; raise as `choose` does."""
        verdict = self.routing.decide(request.route)
        if not verdict.meets_targets:
            self._unmet(verdict)
        return verdict

    def choose(self, request: FleetRequest) -> RankAttempt:
        """Decide for the present phase, and book the work at the winner; raise as `Destination.choose` does."""
        trace, prompt, route = request.trace, request.prompt, request.route
        if trace is not None:
            trace.deciding()
        try:
            verdict = self.routing.decide(route)
            if not verdict.meets_targets:
                self._unmet(verdict)
        except (NoEligibleWorker, WorkerNotNamed, RequestRejected) as error:
            if trace is not None:
                refusal = refusal_of(error, request)
                trace.decided(None, refusal.code or refusal.kind)
            raise
        if prompt is not None:
            if self._kept is not None:
                self._kept.keep(route.decision_id, prompt.ids)
            if self._recent is not None and not request.attempts:
                self._recent.add(RecentPrompt(route.model, route.lora, request.salt, prompt, verdict.now_s))
        attempt = RankAttempt(verdict)
        if trace is not None:
            trace.decided(verdict)
        lease = attempt.lease = self.routing.take(verdict)
        if lease.number % ASKED == 0 and self._sample is not None:
            self._sample(request.inbound, attempt.rank.worker_id)
        return attempt

    def _unmet(self, verdict: Verdict) -> None:
        """No rank is predicted to meet the request's targets: count it, and raise if the policy rejects the request."""
        if verdict.action != "reject":
            self.metrics.count("fallback", "unmet_target")
            return
        self.metrics.count("rejected", "unmet_target")
        message = "no rank is predicted to meet the targets of nvext.router or of policy.ttft_target_s, itl_target_s"
        raise RequestRejected(refusals.unavailable(message, "unmet_target", outcome="refused"))

    def has_other(self, request: FleetRequest) -> bool:
        """Return whether a fit rank other than the present attempt's can serve the request."""
        state, now_s, route, plan = self.routing.state, self.routing.clock.now(), request.first_route, request.plan
        ranks = state.model_view(route.model, route.block_size, route.hash_scheme, now_s)
        assert request.attempt is not None
        plans = [plan]
        if plan.phase in ("prefill", "decode") and not plan.is_fixed:
            plans.append(plan.to("alone"))
        than, routes = request.attempt.rank, [self.route_of(request, each) for each in plans]
        return any("" in exclusions(ranks, replace(each, tried=(*each.tried, than))) for each in routes)

    def reason_to_move(self, attempt: RankAttempt, quiet_s: float, *, begun: bool) -> Move | None:
        """Return why a request is to leave a worker that has not failed; None: it stays.

        All conditions are here. `Request.reason_to_stop` asks at each check of timeouts, twice a second, and moves the
        request only if another worker can take it over. For a condition on what a stream says, `attempt.replay_buffer`
        can keep what it sees of the stream's events (`StreamReplayBuffer.add`).

        Failures are noticed elsewhere: a connection ends, a time limit is exceeded (`AnswerRelay.check_call`), or an
        engine reports an error (`failure_in`).
        """
        if begun and quiet_s < SILENT_S:
            return None
        registration, fleet = attempt.verdict.registration, self.routing.state.fleet
        worker = fleet.worker(registration.worker_id)
        if worker is None or worker.registration.instance != registration.instance:
            return Move("the worker left", is_fault=False)
        silence = fleet.silence(worker)
        return Move(silence, is_fault=True) if silence else None

    def pause_s(self, request: FleetRequest) -> float:
        """Return a pause that doubles with every retry, times a random factor in [0.5, 1.5]."""
        jitter = 0.5 + unit_interval(xxh3_64_intdigest(request.route.decision_id.encode()))
        return float(_BACK_OFF_S * 2 ** max(0, request.plan.retries - 1) * jitter)

    # ------------------------------------------------------------------------------------------- forwarding

    def fetching_call(self, request: FleetRequest) -> OutboundCall | None:
        """The client left: return the call by which a decode worker fetches the request's KV; None: no worker can."""
        try:  # not `decide`: the request is over, so unmet targets neither count nor matter
            return self.call(request, RankAttempt(self.routing.decide(request.route)))
        except (NoEligibleWorker, WorkerNotNamed, CannotResume):
            return None
