"""What all requests share: parsing, deciding, building calls and answers."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kv_protocol.body_limits import Body
from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import ImageRule
from kv_protocol.journal import AttemptEnded
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, PROMPT_ENDPOINTS
from kv_protocol.openai.requests import ChatInbound, Inbound, is_given
from kv_protocol.splitmix import unit_interval
from kv_runtime.telemetry import RateLimitedLog
from router.admin.metrics import RequestMetrics
from router.config import RouterSettings
from router.decision.disaggregation import placement, requested_phase
from router.decision.eligibility import exclusion, exclusions, reason_kind
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.kept_prompts import KeptPrompts
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.drain.recent_prompts import RecentPrompt, RecentPrompts
from router.prompt import EncodedPrompt, ModelPrompts
from router.queue.gate import Admission
from router.queue.tenants import TenantNames
from router.request import refusals
from router.request.bodies import BodyParser
from router.request.calls import Calls, wants_tokens
from router.request.events import AttemptOver
from router.request.plan import RequestPlan, first_phase
from router.request.rank_attempt import RankAttempt
from router.request.refusals import Refusal, RequestRejected
from router.request.request_log import RequestLog
from router.request.route_request import RouteRequestBuilder
from router.request.usage import Usage
from router.server.heads import Headers
from router.server.stream_replay import StreamReplayBuffer
from router.tracing.tracer import Tracer

_BACK_OFF_S = 0.02
"""Mean pause before the first retry; it doubles with each further one."""

_THE_CLIENTS_WORD = frozenset({"pinned", "taint", "lora", "endpoint"})
"""Reasons for which a request can never be served: the client's fault, and not worth a retry."""

_RANKS_MAX = 4096
"""Ranks whose header lines are cached."""

_log = structlog.get_logger("router")


class _ResolvedModel(NamedTuple):
    """A model's name resolved, valid until the fleet changes or a worker's fitness expires."""

    hashing: Hashing
    lora: str
    images: ImageRule | None
    fleet_changes: int
    valid_until_s: float
    endpoints: frozenset[str]
    """All OpenAI endpoints that the model's workers state."""


class Serving:
    """The parts that serve requests, and the metrics and records of each request."""

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
        chat_sent: Callable[[ChatInbound, str], None] = lambda _inbound, _worker_id: None,
        tracer: Tracer | None = None,
    ) -> None:
        """`recent` and `kept` get the prompts of requests, `chat_sent` chats and their workers' ids.

        `tracer` is None if tracing is off.
        """
        self.chat_sent = chat_sent
        self.routing, self.admission, self.metrics = routing, admission, metrics
        self.new_id = new_id
        self.tracer = tracer
        self.inflight = 0
        self._inflight_max = settings.queue.inflight_requests_max
        self._prompts, self._tenants, self._settings = prompts, tenants, settings
        self.bodies = BodyParser(settings.data.body_limits(), checks_options=settings.data.strict_options)
        self._route_request_builder = RouteRequestBuilder(new_id)
        self.calls = Calls(routing.state.fleet, settings, prompts.detokenizer)
        self.request_log = RequestLog(settings.telemetry.request_log_ratio, routing.clock)
        self._worker_log = RateLimitedLog(_log, routing.clock)
        self.retry_after_s_max = settings.failures.retry_after_s_max
        self._conditional = settings.disaggregation.limits()
        failures, disaggregation = settings.failures, settings.disaggregation
        self._splits_prompts, self._accepts_params = disaggregation.enabled, disaggregation.accept_params
        self._retry_limit, self._migration_limit = failures.retry_limit, failures.migration_limit
        self._migration_tokens_max = failures.migration_tokens_max
        self._encodes_always = settings.tokens.always
        self._models: dict[str, _ResolvedModel] = {}
        self._recent, self._kept = recent, kept
        self._rank_lines: dict[WorkerRank, bytes] = {}

    def begin(self) -> Refusal | None:
        """Admit a new request. Return a refusal if there is no capacity; otherwise `ended` must follow."""
        if self.inflight >= self._inflight_max:
            self.metrics.rejected("inflight_requests_max")
            message = f"queue.inflight_requests_max: {self.inflight} requests are being served; try again"
            refusal = refusals.unavailable(message, "overloaded")
            self.request_log.refused(refusal)
            return refusal
        self.inflight += 1
        self.metrics.begin()
        return None

    # ------------------------------------------------------------------------------------------- asking

    def prompt_of(self, inbound: Inbound, body: Body) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":
        """Return the prompt, now or later; None if neither the mode nor the configuration needs it.

        Raises:
            RequestInvalid: `nvext.token_data` is no list of ids.
            RequestRejected: no worker serves the model, or this endpoint of it.
        """
        model, state, endpoint = self._model(inbound.model), self.routing.state, inbound.endpoint
        if endpoint not in model.endpoints:
            raise RequestRejected(refusals.endpoint_not_served(inbound.path, inbound.model, model.endpoints))
        if endpoint not in PROMPT_ENDPOINTS:
            return None
        if not (state.modes[state.policy.mode].reads_overlap or self._encodes_always):
            return None
        return self._prompts.prompt(inbound, model.hashing, model.lora, model.images, body=body)

    def route_request(self, inbound: Inbound, headers: Headers, prompt: EncodedPrompt | None) -> RouteRequest:
        """Return the routing fields of the request; raise `RequestInvalid`, `RequestRejected`."""
        model = self._model(inbound.model)
        hashing = model.hashing if prompt is None else prompt.hashing
        tenant = self._tenants.name(headers.get)
        return self._route_request_builder.route_request(
            inbound, headers, hashing, prompt, lora=model.lora, tenant=tenant
        )

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
        known = self._models[name] = _ResolvedModel(
            hashing, fleet.lora_of(name), fleet.images(name, now_s), fleet.changes, valid_until_s, endpoints
        )
        return known

    def record_prompt(self, route: RouteRequest, inbound: Inbound, prompt: EncodedPrompt | None) -> None:
        """Record the prompt of a request that a worker gets: among the recent ones, and for people if wanted."""
        if prompt is None:
            return
        if self._kept is not None:
            self._kept.keep(route.request_id, prompt.ids, prompt.sequence_hashes)
        if self._recent is not None:
            self._recent.add(
                RecentPrompt(
                    route.model,
                    route.lora,
                    inbound.salt,
                    prompt.ids,
                    prompt.hashing,
                    prompt.sequence_hashes,
                    self.routing.clock.now(),
                )
            )

    # ------------------------------------------------------------------------------------------- deciding

    def plan(self, route: RouteRequest, inbound: Inbound, *, is_sent_here: bool = True) -> RequestPlan:
        """Return the phases in which the present fleet serves the request; raise `RequestInvalid`.

        Without `is_sent_here` a gateway sends the request: once, and to one worker.
        """
        retry_limit = self._retry_limit if is_sent_here else 0
        if inbound.endpoint not in DEFAULT_ENDPOINTS:
            return RequestPlan("whole", retry_limit=retry_limit)
        has_prompt_ids = isinstance(inbound, ChatInbound) and is_given(inbound.prompt_token_ids)
        if is_given(params := inbound.disaggregated_params) or has_prompt_ids:
            phase = requested_phase(bytes(params), accepted=self._accepts_params)
            return RequestPlan(phase, retry_limit=retry_limit, fixed=True)
        now_s = self.routing.clock.now()
        roles = self.routing.state.model_view(route.model, route.block_size, route.hash_scheme, now_s).roles
        is_one = inbound.has_one_choice
        goes_on = route.max_tokens != 1  # for one token no decode worker would fetch the KV
        may_split = is_sent_here and self._splits_prompts and is_one and goes_on
        is_short = route.isl_tokens <= self._migration_tokens_max
        is_movable = is_sent_here and inbound.stream and is_one and is_short and not inbound.is_guided
        return RequestPlan(
            first_phase(roles, may_split=may_split),
            retry_limit=retry_limit,
            migration_limit=self._migration_limit if is_movable else 0,
        )

    def new_replay_buffer(self, headers: Headers) -> StreamReplayBuffer:
        """Return a buffer for a stream that may resume on another worker."""
        return StreamReplayBuffer(self._settings.failures.migration_bytes_max, hides_tokens=not wants_tokens(headers))

    def route_of(
        self, route: RouteRequest, plan: RequestPlan, inbound: Inbound, prefill: WorkerRegistered | None
    ) -> RouteRequest:
        """Return the routing fields for the plan's phase, under a new decision id.

        The prefill worker is named apart from the decode worker; a session is bound to its prefill rank. `prefill` is
        the worker that computed the prompt, for a decode phase.
        """
        phase, extension, pins = plan.phase, inbound.extension, dict[str, Any]()
        if phase == "prefill":
            worker: str | int | None = extension.prefill_worker_id
            pins = {"pinned_worker": None if worker is None else str(worker)}
            pins["pinned_dp_rank"] = extension.prefill_dp_rank
            pins["prefill_worker"] = ""
        elif phase == "decode":
            pins = {"session_id": "", "prefill_worker": "" if prefill is None else prefill.worker_id}
            pins["transfer_domain"] = None if prefill is None else prefill.transfer_domain
        return replace(
            route,
            phase=phase,
            tried=plan.tried,
            decision_id=self.new_id(),
            **pins,
        )

    def placed(self, route: RouteRequest, plan: RequestPlan, inbound: Inbound) -> None:
        """Compute the prompt at the decode worker if the configuration and the state of the fleet say so."""
        if self._conditional.policy == "off" or plan.phase != "prefill" or plan.is_fixed:
            return
        try:
            verdict = self.routing.decide(self.route_of(route, plan.beside("alone"), inbound, None))
        except (NoEligibleWorker, WorkerNotNamed):
            return
        placed = placement(verdict, self._conditional)
        self.metrics.placed(placed.reason)
        if placed.is_local:
            plan.compute_at_decode()

    def decide(self, route: RouteRequest) -> Verdict:
        """Return the decision; raise `RequestRejected`, or `NoEligibleWorker` if no worker is eligible."""
        routing = self.routing
        try:
            verdict = routing.decide(route)
        except WorkerNotNamed as error:
            raise RequestRejected(refusals.invalid(str(error), error.field)) from error
        if not verdict.meets_targets:
            self._unmet(verdict)
        self.metrics.chosen(routing.match_s, routing.choose_s)
        return verdict

    def lost(self, attempt: RankAttempt) -> str:
        """Return why no answer of the attempt's worker is awaited where another can give it; empty if it is."""
        registration = attempt.verdict.registration
        return self.routing.state.fleet.lost(registration.worker_id, registration.instance)

    def has_other(
        self,
        than: WorkerRank,
        route: RouteRequest,
        plan: RequestPlan,
        inbound: Inbound,
        prefill: WorkerRegistered | None,
    ) -> bool:
        """Return whether a fit rank other `than` this can serve the request; the further arguments as of `route_of`."""
        state, now_s = self.routing.state, self.routing.clock.now()
        ranks = state.model_view(route.model, route.block_size, route.hash_scheme, now_s)
        if not ranks.roles:  # the usual case, without a look at each rank
            return False
        plans = [plan]
        if plan.phase in ("prefill", "decode") and not plan.is_fixed:
            plans.append(plan.beside("alone"))
        routes = [self.route_of(route, each, inbound, prefill) for each in plans]
        return any("" in exclusions(ranks, replace(each, tried=(*each.tried, than))) for each in routes)

    def no_candidate(self, route: RouteRequest, error: NoEligibleWorker) -> Refusal:
        """Return the error for a request of which no rank is eligible."""
        kinds = {reason_kind(self._lasting(route, each) or each.reason) for each in error.exclusions}
        if kinds == {"max_seq_len"}:
            return refusals.invalid(str(error), code="context_length_exceeded")
        if kinds and kinds <= _THE_CLIENTS_WORD:
            return refusals.invalid(str(error), code="no_such_worker")
        return refusals.unavailable(str(error), "no_eligible_worker")

    def _lasting(self, route: RouteRequest, found: Exclusion) -> str:
        """Return why the rank can never take the request, even when fit; empty if it can."""
        worker = self.routing.state.fleet.worker(found.worker_id)
        rank = WorkerRank(found.worker_id, found.dp_rank)
        return "" if worker is None else exclusion(worker.registration, rank, route)

    def _unmet(self, verdict: Verdict) -> None:
        """No rank is predicted to meet the request's targets: go on or refuse, as configured."""
        if verdict.action != "reject":
            self.metrics.fallback("unmet_target")
            return
        self.metrics.rejected("unmet_target")
        message = "no rank is predicted to meet the targets of nvext.router or of policy.ttft_target_s, itl_target_s"
        raise RequestRejected(refusals.unavailable(message, "unmet_target", outcome="refused"))

    # ------------------------------------------------------------------------------------------- forwarding

    def answer_headers(self, verdict: Verdict, inbound: Inbound, prompt: EncodedPrompt | None) -> bytes:
        """Return the answer's header lines that say how the request was routed."""
        request = verdict.request
        lines = b"x-request-id: %b\r\nx-decision-id: %b\r\n%bx-overlap-blocks: %d\r\n" % (
            request.request_id.encode(),
            request.decision_id.encode(),
            self._rank_lines.get(verdict.winner) or self._lines_of(verdict.winner),
            verdict.overlap_blocks,
        )
        if prompt is not None and prompt.unrendered:
            lines += f"x-kv-unrendered: {prompt.unrendered}\r\n".encode()
        if ignored := inbound.ineffective:
            lines += f"x-ignored-parameters: {', '.join(ignored)}\r\n".encode()
        return lines

    def _lines_of(self, rank: WorkerRank) -> bytes:
        if len(self._rank_lines) >= _RANKS_MAX:
            self._rank_lines.clear()
        lines = f"x-worker-instance-id: {rank.worker_id}\r\nx-dp-rank: {rank.dp_rank}\r\n".encode()
        self._rank_lines[rank] = lines
        return lines

    def after_back_off(self, retry: int, decision_id: str, again: Callable[[], None]) -> None:
        """Call `again` after a pause that doubles with every retry, times a random factor in [0.5, 1.5]."""
        jitter = 0.5 + unit_interval(xxh3_64_intdigest(decision_id.encode()))
        asyncio.get_running_loop().call_later(_BACK_OFF_S * 2 ** (retry - 1) * jitter, again)

    # ------------------------------------------------------------------------------------------- settling

    def ended(self, model: str, mode: str, outcome: str, duration_s: float) -> None:
        """A request ended: count it."""
        self.inflight -= 1
        self.metrics.end(model, mode, outcome, duration_s)

    def attempt_over(
        self, attempt: RankAttempt, over: AttemptOver, erred_before: tuple[WorkerRank, ...], names: dict[str, str]
    ) -> None:
        """An attempt ended: end its lease, update the rank's breaker, and poke the queue.

        `erred_before`: ranks that failed the same request, possibly by its fault. `names`: its ids, for the log.
        """
        usage = over.usage
        attempt.lease.end(
            over.outcome,
            usage.cached_tokens,
            usage.output_tokens,
            came_whole=over.came_whole,
            arrival=attempt.arrival(over.later_tokens),
        )
        outcome = "cancelled" if over.outcome == "cancelled" else attempt.outcome
        if outcome == "ok" and not erred_before and self.routing.state.breakers.are_all_closed:
            self.admission.poke()  # no breaker changes, now or later
            return
        rank = attempt.verdict.winner
        if outcome in ("failed", "erred"):
            self._worker_log.warning(
                "worker_failed",
                key=(rank, attempt.phase),
                worker=rank.worker_id,
                dp_rank=rank.dp_rank,
                phase=attempt.phase,
                reason=attempt.reason,
                **names,
            )
            self.metrics.worker_failed(rank.worker_id, attempt.phase)
        self.routing.apply(
            AttemptEnded(
                now_s=self.routing.clock.now(),
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                outcome=outcome,
                phase=attempt.phase if attempt.reason else "",
                reason=attempt.reason,
                retry_after_s=attempt.retry_after_s,
                decision_id=attempt.verdict.request.decision_id,
                erred_before=erred_before if outcome == "ok" else (),
            )
        )
        self.admission.poke()

    def settled(self, attempt: RankAttempt, usage: Usage) -> None:
        """A request was answered."""
        verdict = attempt.verdict
        request = verdict.request
        isl_tokens = request.known_tokens or usage.input_tokens or 0
        self.metrics.finished(verdict.policy, isl_tokens, usage.output_tokens, attempt.lease.itl_s)
        if usage.cached_tokens is not None and request.known_tokens and request.phase != "decode":
            predicted_tokens = verdict.overlap_blocks * request.block_size
            self.metrics.settled(verdict.winner.worker_id, predicted_tokens, usage.cached_tokens)
            self.routing.compare(verdict, usage.cached_tokens)
