"""Where requests of clients go: the workers of the fleet. Deciding, calls, answers, and the records of each request."""

from asyncio import Future
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, NamedTuple

import structlog
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import ImageRule
from kv_protocol.journal import AttemptEnded, AttemptOutcome, OutcomeName
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, PROMPT_ENDPOINTS
from kv_protocol.openai.passed import PassedInbound
from kv_protocol.openai.requests import ChatInbound, Inbound, decode_inbound
from kv_protocol.splitmix import unit_interval
from kv_runtime.telemetry import RateLimitedLog
from router.config import RouterSettings
from router.decision.disaggregation import placement, requested_phase
from router.decision.eligibility import exclusion, exclusions, reason_kind
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.kept_prompts import KeptPrompts
from router.decision.plan import RequestPlan, first_phase
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.fleet.registry import SILENT_S
from router.http import refusals
from router.http.accounts import Account
from router.http.exchange import Exchange, OutboundCall
from router.http.refusals import Refusal, RequestRejected
from router.http.stream_replay import StreamReplayBuffer
from router.http.usage import NO_USAGE
from router.metrics.request import RequestMetrics
from router.prompt.chains import EncodedPrompt, RecentPrompt, RecentPrompts
from router.prompt.prompts import ModelPrompts
from router.queue.gate import Admission
from router.queue.tenants import TenantNames
from router.request.attempt import RankAttempt
from router.request.bodies import BodyParser, ReadBody
from router.request.calls import Calls, wants_tokens
from router.request.destination import Destination, Gateway
from router.request.passed import MODE as PASSED
from router.request.passed import completed, read_passed
from router.request.replies import refuse
from router.request.request import Request, log_names
from router.request.request_log import RequestLog
from router.request.resumption import CannotResume
from router.request.route_request import route_request
from router.request.trace_record import RequestEnd, is_error
from router.request.tracer import Tracer

_BACK_OFF_S = 0.02
"""Mean pause before the first retry; it doubles with each further one."""

_CLIENT_FAULTS = frozenset({"pinned", "taint", "lora", "endpoint"})
"""Reasons for which a request can never be served: the client's fault, and not worth a retry."""

_MIGRATED_TOKENS_MAX = 1 << 20
"""Longer prompts do not migrate: to compute one again would take a worker for minutes."""
_REPLAYED_BYTES_MAX = 1 << 20
"""Of a longer answer nothing is kept, and it does not migrate: each stream in progress takes as much memory."""
_RANKS_MAX = 4096
"""Ranks whose header lines are cached."""

_log = structlog.get_logger("router")
FleetRequest = Request[RankAttempt]


class _ResolvedModel(NamedTuple):
    """A model's name resolved, valid until the fleet changes or a worker's fitness expires."""

    hashing: Hashing
    lora: str
    images: ImageRule | None
    fleet_changes: int
    valid_until_s: float
    endpoints: frozenset[str]
    """All OpenAI endpoints that the model's workers state."""
    is_aggregated: bool
    """Whether all of its workers compute prompts and generate."""


class Serving(Destination[RankAttempt]):
    """The parts that serve requests at workers."""

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
        chat_sent: Callable[[ChatInbound, str], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`recent` and `kept` get the prompts of requests, `chat_sent` chats and their workers' ids.

        `tracer` is None if tracing is off.
        """
        self.routing, self.metrics, self.new_id = routing, metrics, new_id
        self.bodies = BodyParser(settings.data.body_limits())
        self.request_log = RequestLog(settings.telemetry.request_log_ratio, routing.clock)
        self._admission, self._chat_sent, self._tracer = admission, chat_sent, tracer
        self._inflight_max = settings.queue.inflight_requests_max
        self._prompts, self._tenants, self._recent, self._kept = prompts, tenants, recent, kept
        self._calls = Calls(settings, prompts.detokenizer)
        self._worker_log = RateLimitedLog(_log, routing.clock)
        self._conditional = settings.disaggregation.limits()
        self._failures, disaggregation = settings.failures, settings.disaggregation
        self._splits_prompts, self._accepts_params = disaggregation.enabled, disaggregation.accept_params
        self._encodes_always = settings.tokens.always
        self._models: dict[str, _ResolvedModel] = {}
        self._rank_lines: dict[WorkerRank, bytes] = {}

    def serve(self, exchange: Exchange, mode: str = "", gateway: Gateway | None = None) -> "FleetRequest | None":
        """Serve a request; return it, None if it is refused for want of capacity, or by its account's limits.

        `mode` is that of its metrics, that in force without it.
        """
        if self.metrics.inflight >= self._inflight_max:
            self.metrics.rejected("inflight_requests_max")
            message = f"queue.inflight_requests_max: {self._inflight_max} requests are being served; try again"
            self.refuse(exchange, refusals.unavailable(message, "overloaded"))
            return None
        account = exchange.account
        if account is not None and (refusal := account.refusal(self.routing.clock.now())) is not None:
            self.metrics.rejected(refusal.param or "")
            self.refuse(exchange, refusal)
            return None
        self.metrics.inflight += 1
        trace = None if self._tracer is None else self._tracer.begin(exchange.headers, exchange.began_s)
        request: FleetRequest = Request(exchange, self, mode or self.routing.policy.mode, gateway, trace)
        request.begin()
        return request

    def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """Log and refuse a request that is not served."""
        self.request_log.refused(refusal)
        refuse(exchange, refusal)

    # ------------------------------------------------------------------------------------------- what is asked

    async def read(self, request: FleetRequest) -> None:
        """Set the request's body, prompt, route and plan.

        Raises:
            RequestInvalid: a field or a header cannot be read.
            RequestRejected: no worker serves the model, or this endpoint of it.
        """
        exchange, metrics, began_s = request.exchange, self.metrics, perf_counter()
        headers, reads_prompts = exchange.headers, self._encodes_always or self.routing.state.reads_overlap
        if request.mode == PASSED:
            read = read_passed(exchange, self.bodies)
        else:
            decode = self._prompts.decode if reads_prompts else decode_inbound
            read = self.bodies.read(exchange.path, exchange.body, decode)
        if isinstance(read, Future):
            reading: Coroutine[Any, Any, ReadBody] = request.later(read)
            del read  # its error would refer to itself
            body, inbound = await reading
        else:
            body, inbound = read
        if isinstance(inbound, PassedInbound):
            inbound = completed(inbound, exchange, self.routing.state.fleet)
        parsed_s = perf_counter()
        metrics.parsed(parsed_s - began_s)
        request.body, request.inbound = body, inbound
        name = request.model = inbound.model or ""
        model, endpoint, prompt = self._model(name), inbound.endpoint, None
        if endpoint not in model.endpoints:
            raise RequestRejected(refusals.endpoint_not_served(inbound.path, name, model.endpoints))
        hashing = model.hashing
        if endpoint in PROMPT_ENDPOINTS and reads_prompts:
            made = self._prompts.prompt(body, inbound, hashing, model.lora, model.images)
            if isinstance(made, Future):
                encoding: Coroutine[Any, Any, EncodedPrompt] = request.later(made)
                del made
                prompt = await encoding
            else:
                prompt = made
            hashing, prompt_s = prompt.hashing, perf_counter() - parsed_s
            metrics.tokenized(prompt_s)
            if request.trace is not None:
                request.trace.prompted(prompt_s)
        request.prompt = prompt
        account = None if exchange.account is None else exchange.account.name
        tenant = self._tenants.name(headers.get, account)
        route = route_request(self.new_id, inbound, headers, hashing, prompt, lora=model.lora, tenant=tenant)
        if request.gateway is not None and request.gateway.allowed_workers is not None:
            route = replace(route, allowed_workers=request.gateway.allowed_workers)
        request.route = request.first_route = route
        plan = request.plan = self._plan_of(request, model)
        if plan.phase != "whole":
            self._place(request, plan)
            request.route = self._route_of(request, plan)

    def _plan_of(self, request: FleetRequest, model: _ResolvedModel) -> RequestPlan:
        """Return the phases in which the present fleet serves the request; raise `RequestInvalid`."""
        inbound, route, failures = request.inbound, request.route, self._failures
        is_sent_here = request.gateway is None  # else once, and to one worker
        retry_limit = failures.retry_limit if is_sent_here else 0
        if route.endpoint not in DEFAULT_ENDPOINTS:
            return RequestPlan("whole", retry_limit=retry_limit)
        if inbound.names_phase:
            phase = requested_phase(bytes(inbound.disaggregated_params), accepted=self._accepts_params)
            return RequestPlan(phase, retry_limit=retry_limit, fixed=True)
        is_one, phase, migrations = is_sent_here and inbound.has_one_choice, "whole", 0
        if not model.is_aggregated:
            now_s = self.routing.clock.now()
            roles = self.routing.state.model_view(route.model, route.block_size, route.hash_scheme, now_s).roles
            # for one token no KV would be fetched
            phase = first_phase(roles, may_split=self._splits_prompts and is_one and route.max_tokens != 1)
        if inbound.stream and is_one and route.isl_tokens <= _MIGRATED_TOKENS_MAX and not inbound.is_guided:
            migrations = failures.migration_limit
        return RequestPlan(phase, retry_limit=retry_limit, migration_limit=migrations)

    def _place(self, request: FleetRequest, plan: RequestPlan) -> None:
        """Compute the prompt at the decode worker if the configuration and the state of the fleet say so."""
        if self._conditional.policy == "off" or plan.phase != "prefill" or plan.is_fixed:
            return
        try:
            verdict = self.routing.decide(self._route_of(request, plan.beside("alone")))
        except (NoEligibleWorker, WorkerNotNamed):
            return
        placed = placement(verdict, self._conditional)
        self.metrics.placed(placed.reason)
        if placed.is_local:
            plan.compute_at_decode()

    def _model(self, name: str) -> _ResolvedModel:
        fleet, now_s = self.routing.state.fleet, self.routing.clock.now()
        known = self._models.get(name)
        if known is not None and known.fleet_changes == fleet.changes and now_s < known.valid_until_s:
            return known
        hashing = fleet.hashing(name, now_s)
        if hashing is None:
            self._models.pop(name, None)
            raise RequestRejected(refusals.unknown_model(name, fleet.models()))
        workers = fleet.serving(name)
        valid_until_s = fleet.valid_until_s(workers, now_s)
        endpoints = frozenset(each for worker in workers for each in worker.registration.api_endpoints)
        is_aggregated = all(worker.registration.role == "aggregated" for worker in workers)
        images, changes = fleet.images(name, now_s), fleet.changes
        known = self._models[name] = _ResolvedModel(
            hashing, fleet.lora_of(name), images, changes, valid_until_s, endpoints, is_aggregated
        )
        return known

    # ------------------------------------------------------------------------------------------- admission

    def admits(self, request: FleetRequest) -> bool:
        """Return whether the request goes on at once; else it is resumed later, with a refusal or None."""
        if self._admission.admits(request.route):
            return True
        request.ticket = self._admission.wait(request.route, request.resume, request.resume)
        return False

    def waited(self, request: FleetRequest, refusal: Refusal | None) -> None:
        """The request was resumed; raise `RequestRejected` if it was turned away."""
        ticket, request.ticket = request.ticket, None
        if ticket is not None:
            self.metrics.queue_waited(ticket.waited_s)
            if request.trace is not None:
                request.trace.waited(ticket.waited_s)
        if refusal is not None:
            self.metrics.rejected(refusal.code or "")
            raise RequestRejected(refusal)

    # ------------------------------------------------------------------------------------------- deciding

    def routed(self, request: FleetRequest, pinned: str | None = None) -> None:
        """Set `route` to that of the plan's present phase, under a new decision id. `pinned`: the only worker."""
        request.route = self._route_of(request, request.plan)
        if pinned is not None:
            request.route = replace(request.route, pinned_worker=pinned)

    def _route_of(self, request: FleetRequest, plan: RequestPlan) -> RouteRequest:
        """Return the routing fields for the plan's phase.

        The prefill worker is named apart from the decode worker; a session is bound to its prefill rank.
        """
        phase, extension, pins = plan.phase, request.inbound.extension, dict[str, Any]()
        if phase == "prefill":
            worker: str | int | None = extension.prefill_worker_id
            pins = {"pinned_worker": None if worker is None else str(worker)}
            pins["pinned_dp_rank"] = extension.prefill_dp_rank
            pins["prefill_worker"] = ""
        elif phase == "decode":
            rank = request.prefilled_by
            prefill = None if rank is None else self.routing.state.fleet.worker(rank.worker_id)
            pins = {"session_id": "", "prefill_worker": "" if prefill is None else prefill.registration.worker_id}
            pins["transfer_domain"] = None if prefill is None else prefill.registration.transfer_domain
        return replace(request.first_route, phase=phase, tried=plan.tried, decision_id=self.new_id(), **pins)

    def decide(self, route: RouteRequest) -> Verdict:
        """Return the decision; raise `RequestRejected`."""
        routing = self.routing
        try:
            verdict = routing.decide(route)
        except WorkerNotNamed as error:
            raise RequestRejected(refusals.invalid(str(error), error.field)) from error
        except NoEligibleWorker as error:
            raise RequestRejected(self._no_candidate(route, error), error.exclusions) from error
        if not verdict.meets_targets:
            self._unmet(verdict)
        self.metrics.chosen(routing.match_s, routing.choose_s)
        return verdict

    def choose(self, request: FleetRequest) -> RankAttempt:
        """Decide for the present phase, and book the work at the winner; raise `RequestRejected`."""
        trace, inbound = request.trace, request.inbound
        if trace is not None:
            trace.deciding()
        try:
            verdict = self.decide(request.route)
        except RequestRejected as error:
            if trace is not None:
                trace.decided(None, error.refusal.code or error.refusal.kind)
            raise
        if request.prompt is not None and not request.attempts:
            self._record_prompt(request.first_route, inbound, request.prompt)
        if self._chat_sent is not None and isinstance(inbound, ChatInbound):
            self._chat_sent(inbound, verdict.winner.worker_id)
        attempt = RankAttempt(verdict, self.routing.take(verdict))
        if trace is not None:
            trace.decided(verdict)
        return attempt

    def _record_prompt(self, route: RouteRequest, inbound: Inbound, prompt: EncodedPrompt) -> None:
        """Record the prompt of a request that a worker gets: among the recent ones, and for people if wanted."""
        if self._kept is not None:
            self._kept.keep(route.request_id, prompt.ids, prompt.sequence_hashes)
        if self._recent is not None:
            now_s = self.routing.clock.now()
            self._recent.add(RecentPrompt(route.model, route.lora, inbound.salt, prompt, now_s))

    def _unmet(self, verdict: Verdict) -> None:
        """No rank is predicted to meet the request's targets: go on or refuse, as configured."""
        if verdict.action != "reject":
            self.metrics.fallback("unmet_target")
            return
        self.metrics.rejected("unmet_target")
        message = "no rank is predicted to meet the targets of nvext.router or of policy.ttft_target_s, itl_target_s"
        raise RequestRejected(refusals.unavailable(message, "unmet_target", outcome="refused"))

    def _no_candidate(self, route: RouteRequest, error: NoEligibleWorker) -> Refusal:
        """Return the error for a request of which no rank is eligible."""
        kinds = {reason_kind(self._lasting(route, each) or each.reason) for each in error.exclusions}
        if kinds == {"max_seq_len"}:
            return refusals.invalid(str(error), code="context_length_exceeded")
        if kinds and kinds <= _CLIENT_FAULTS:
            return refusals.invalid(str(error), code="no_such_worker")
        return refusals.unavailable(str(error), "no_eligible_worker")

    def _lasting(self, route: RouteRequest, found: Exclusion) -> str:
        """Return why the rank can never take the request, even when fit; empty if it can."""
        worker = self.routing.state.fleet.worker(found.worker_id)
        rank = WorkerRank(found.worker_id, found.dp_rank)
        return "" if worker is None else exclusion(worker.registration, rank, route)

    def has_other(self, request: FleetRequest) -> bool:
        """Return whether a fit rank other than the present attempt's can serve the request."""
        state, now_s, route, plan = self.routing.state, self.routing.clock.now(), request.first_route, request.plan
        ranks = state.model_view(route.model, route.block_size, route.hash_scheme, now_s)
        if not ranks.roles:  # the usual case, without a look at each rank
            return False
        assert request.attempt is not None
        plans = [plan]
        if plan.phase in ("prefill", "decode") and not plan.is_fixed:
            plans.append(plan.beside("alone"))
        than, routes = request.attempt.rank, [self._route_of(request, each) for each in plans]
        return any("" in exclusions(ranks, replace(each, tried=(*each.tried, than))) for each in routes)

    def lost(self, attempt: RankAttempt, quiet_s: float, *, begun: bool) -> str:
        """Return why the worker seems to be lost: it is silent, as is its answer if that has begun, or has left."""
        if begun and quiet_s < SILENT_S:
            return ""
        registration = attempt.verdict.registration
        return self.routing.state.fleet.lost(registration.worker_id, registration.instance)

    def pause_s(self, request: FleetRequest, retry: int) -> float:
        """Return a pause that doubles with every retry, times a random factor in [0.5, 1.5]."""
        jitter = 0.5 + unit_interval(xxh3_64_intdigest(request.route.decision_id.encode()))
        return float(_BACK_OFF_S * 2 ** (retry - 1) * jitter)

    # ------------------------------------------------------------------------------------------- forwarding

    def call(self, request: FleetRequest, attempt: RankAttempt) -> OutboundCall:
        """Return the call to the chosen worker; raise `CannotResume`."""
        trace, gateway, headers = request.trace, request.gateway, request.exchange.headers
        if trace is not None:
            headers = trace.sending(headers)
        try:
            call = self._calls.call(request, attempt.verdict, headers, request.replay_buffer)
        except CannotResume:
            if trace is not None:
                trace.not_sent()
            raise
        if gateway is None or request.route.pinned_worker == attempt.rank.worker_id:
            return call
        return replace(call, alternatives=gateway.alternatives(attempt.verdict))

    def fetching_call(self, request: FleetRequest) -> OutboundCall | None:
        """Return a call to a decode worker that fetches the KV of `request.handoff`, whose client left; None: none."""
        headers = request.exchange.headers
        if request.trace is not None:
            headers = request.trace.beside(headers)
        try:
            return self._calls.call(request, self.decide(request.route), headers, None)
        except (RequestRejected, CannotResume):
            return None

    def replay_buffer(self, request: FleetRequest) -> StreamReplayBuffer:
        """Return a buffer for a stream that may resume on another worker."""
        hides_tokens = not wants_tokens(request.exchange.headers)
        return StreamReplayBuffer(_REPLAYED_BYTES_MAX, hides_tokens=hides_tokens)

    def answer_lines(self, request: FleetRequest, attempt: RankAttempt, *, is_aside: bool) -> bytes:
        """Return the answer's header lines that say how the request was routed."""
        route, verdict, prompt, rank = attempt.verdict.request, attempt.verdict, request.prompt, attempt.rank
        lines = b"x-request-id: %b\r\nx-decision-id: %b\r\n%bx-overlap-blocks: %d\r\n" % (
            route.request_id.encode(),
            route.decision_id.encode(),
            self._rank_lines.get(rank) or self._lines_of(rank),
            verdict.overlap_blocks,
        )
        if prompt is not None and prompt.unrendered:
            lines += f"x-kv-unrendered: {prompt.unrendered}\r\n".encode()
        if ignored := request.inbound.ineffective:
            lines += f"x-ignored-parameters: {', '.join(ignored)}\r\n".encode()
        if attempt.reason:
            lines += f"x-kv-failure: {rank}: {attempt.reason}; no other worker is left\r\n".encode()
        if not is_aside and request.prefilled_by is not None:
            lines += b"x-prefill-instance-id: %b\r\n" % request.prefilled_by.worker_id.encode()
        return lines

    def _lines_of(self, rank: WorkerRank) -> bytes:
        if len(self._rank_lines) >= _RANKS_MAX:
            self._rank_lines.clear()
        lines = f"x-worker-instance-id: {rank.worker_id}\r\nx-dp-rank: {rank.dp_rank}\r\n".encode()
        self._rank_lines[rank] = lines
        return lines

    # ------------------------------------------------------------------------------------------- the records

    def unserved(self, request: FleetRequest, exclusions: tuple[Exclusion, ...]) -> None:
        """The request is refused because no worker is eligible."""
        self.routing.refuse(request.route, exclusions)

    def began(self, request: FleetRequest, attempt: RankAttempt) -> None:
        """The worker computed the prompt."""
        attempt.lease.first_token()
        if request.trace is not None:
            request.trace.began()
        if attempt.is_streamed and attempt.is_answered and not request.plan.is_aside:
            self._first_token(request, attempt, attempt.lease.first_byte_s)
        self._admission.poke()

    def _first_token(self, request: FleetRequest, attempt: RankAttempt, ttft_s: float | None) -> None:
        """The answer's first token came: the client's, unless another worker began the answer."""
        if ttft_s is not None and request.progress is None:
            first = request.attempts[0] if request.attempts else attempt
            ttft_s += attempt.verdict.now_s - first.verdict.now_s
            self.metrics.first_token(request.mode, request.model, attempt.rank.worker_id, ttft_s)
            if request.trace is not None:
                request.trace.ttft_s = ttft_s

    def settle(self, request: FleetRequest, attempt: RankAttempt, outcome: OutcomeName) -> None:
        """A worker's part is over: end its lease, update the rank's breaker, poke the queue, count the answer."""
        usage, attempts = attempt.usage, request.attempts
        attempt.lease.end(
            outcome,
            usage.cached_tokens,
            usage.output_tokens,
            came_whole=attempt.came_whole,
            is_streamed=attempt.is_streamed,
            later_tokens=attempt.later_tokens or 0,
            decode_s=attempt.decode_s,
        )
        if outcome != "ok" or len(attempts) > 1 or self.routing.state.breakers.is_any:  # else no breaker changes
            self._judge(request, attempt, "cancelled" if outcome == "cancelled" else attempt.outcome)
        self._admission.poke()
        if request.trace is not None:
            request.trace.attempt_over(attempt, outcome)
        if request.is_over and attempt.later_tokens is not None and attempt.is_answered:
            self._answered(request, attempt)

    def _judge(self, request: FleetRequest, attempt: RankAttempt, outcome: AttemptOutcome) -> None:
        """Tell the rank's breaker, and of ranks that failed the same request before, possibly by its fault."""
        rank = attempt.rank
        erred = tuple(each.rank for each in request.attempts[:-1] if each.outcome == "erred")
        if outcome == "ok" and not erred and not self.routing.state.breakers.is_any:
            return
        if outcome in ("failed", "erred"):
            self._worker_log.warning(
                "worker_failed",
                key=(rank, attempt.stage),
                worker=rank.worker_id,
                dp_rank=rank.dp_rank,
                phase=attempt.stage,
                reason=attempt.reason,
                **log_names(request),
            )
            self.metrics.worker_failed(rank.worker_id, attempt.stage)
        self.routing.apply(
            AttemptEnded(
                now_s=self.routing.clock.now(),
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                outcome=outcome,
                phase=attempt.stage if attempt.reason else "",
                reason=attempt.reason,
                retry_after_s=attempt.retry_after_s,
                decision_id=attempt.verdict.request.decision_id,
                erred_before=erred if outcome == "ok" else (),
            )
        )

    def _answered(self, request: FleetRequest, attempt: RankAttempt) -> None:
        """The client has its answer."""
        if attempt.came_whole or not attempt.is_streamed:
            self._first_token(request, attempt, attempt.lease.ttft_s)
        usage, verdict = attempt.usage, attempt.verdict
        route = verdict.request
        known_tokens = route.known_tokens
        isl_tokens = known_tokens or usage.input_tokens or 0
        self.metrics.finished(verdict.policy, isl_tokens, usage.output_tokens, attempt.lease.itl_s)
        if usage.cached_tokens is not None and known_tokens and route.phase != "decode":
            predicted_tokens = verdict.overlap_blocks * route.block_size
            self.metrics.settled(attempt.rank.worker_id, predicted_tokens, usage.cached_tokens)
            self.routing.compare(verdict, usage.cached_tokens)

    def ended(self, request: FleetRequest, outcome: OutcomeName, refusal: Refusal | None) -> None:
        """The request is over: count and log it, and send its trace if it is wanted."""
        metrics, attempts, trace = self.metrics, request.attempts, request.trace
        if request.ticket is not None:
            request.ticket.cancel()
        e2e_s = perf_counter() - request.exchange.began_s
        if request.exchange.account is not None:
            _charge(request, request.exchange.account)
        metrics.end(request.model, request.mode, outcome, e2e_s)
        if len(attempts) > 1 or outcome != "ok":
            self._count_detours(request)
        if self.request_log.is_on or refusal is not None or outcome == "failed":
            self.request_log.ended(request, outcome, refusal, e2e_s)
        if trace is None:
            return
        status = 0
        if outcome != "cancelled":  # else unknown: the client left
            last = attempts[-1].status if attempts else 0
            status = last if refusal is None else refusal.status
        if trace.is_wanted(has_failed=is_error(outcome, status)):
            trace.send(_request_end(request, outcome, refusal, status))
            decision_id = request.route.decision_id if request.is_read else ""
            metrics.traced(request.mode, trace.hex_id, decision_id, e2e_s, trace.ttft_s)

    def _count_detours(self, request: FleetRequest) -> None:
        for attempt in request.attempts[:-1]:
            if attempt.is_retried:
                self.metrics.retried(attempt.stage)
        for why in request.plan.reroutes if request.is_read else ():
            self.metrics.rerouted(why)
        if request.stream_loss is not None:
            self.metrics.stream_lost(request.stream_loss)


def _charge(request: FleetRequest, account: Account) -> None:
    """Charge the tokens of a request to its account; of an answer that its client left, those that had come."""
    if not request.attempts:
        return
    last = request.attempts[-1]
    later = request.events_when_left if last.later_tokens is None else last.later_tokens
    prompt_tokens = request.route.known_tokens or last.usage.input_tokens or 0
    account.charge(prompt_tokens + (last.usage.output_tokens or later + last.has_begun))


def _request_end(request: FleetRequest, outcome: OutcomeName, refusal: Refusal | None, status: int) -> RequestEnd:
    """Return what a trace says of the end."""
    attempts = request.attempts
    error = "" if refusal is None else refusal.code or refusal.kind
    if refusal is None and outcome == "failed":
        error = attempts[-1].stage if attempts else "failed"
    migrations = request.plan.migrations if request.is_read else 0
    return RequestEnd(
        request.route if request.is_read else None,
        request.model,
        request.exchange.path,
        request.mode,
        outcome,
        status,
        error,
        attempts[-1].usage if attempts else NO_USAGE,
        perf_counter(),
        retries=sum(bool(each.reason) for each in attempts[:-1]) - migrations,
        migrations=migrations,
    )
