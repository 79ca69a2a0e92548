"""Reads requests: body, prompt, routing fields, and the phases in which the present fleet serves them."""

from asyncio import Future
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import Hashing
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, PROMPT_ENDPOINTS
from kv_protocol.openai.passed import PassedInbound
from kv_protocol.openai.requests import decode_inbound
from router.config import RouterSettings
from router.decision.disaggregation import placement, requested_phase
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import RequestPlan, first_phase
from router.decision.routing import Routing
from router.http import refusals
from router.http.refusals import RequestRejected
from router.metrics.request import RequestMetrics
from router.prompt.prompts import ModelPrompts
from router.queue.tenants import TenantNames
from router.request.bodies import BodyParser, ReadBody
from router.request.passed import MODE as PASSED
from router.request.passed import completed, read_passed
from router.request.route_request import route_request

if TYPE_CHECKING:
    from router.prompt.chains import EncodedPrompt
    from router.request.serving import FleetRequest

_MIGRATED_TOKENS_MAX = 1 << 20
"""Longer prompts do not migrate: to compute one again would take a worker for minutes."""


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


class RequestReader:
    """Reads the requests that workers of the fleet serve."""

    def __init__(
        self,
        routing: Routing,
        prompts: ModelPrompts,
        metrics: RequestMetrics,
        tenants: TenantNames,
        settings: RouterSettings,
        new_id: Callable[[], str],
    ) -> None:
        self.bodies = BodyParser(settings.data.body_limits())
        self._routing, self._prompts, self._metrics = routing, prompts, metrics
        self._tenants, self._new_id = tenants, new_id
        self._conditional = settings.disaggregation.limits()
        self._failures, disaggregation = settings.failures, settings.disaggregation
        self._splits_prompts, self._accepts_params = disaggregation.enabled, disaggregation.accept_params
        self._encodes_always = settings.tokens.always
        self._models: dict[str, _ResolvedModel] = {}

    async def read(self, request: "FleetRequest") -> None:
        """Set the request's body, prompt, route and plan.

        Raises:
            RequestInvalid: a field or a header cannot be read.
            RequestRejected: no worker serves the model, or this endpoint of it.
        """
        exchange, metrics, began_s = request.exchange, self._metrics, perf_counter()
        headers, reads_prompts = exchange.headers, self._encodes_always or self._routing.state.reads_overlap
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
            inbound = completed(inbound, exchange, self._routing.state.fleet)
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
        route = route_request(self._new_id, inbound, headers, hashing, prompt, lora=model.lora, tenant=tenant)
        if request.gateway is not None and request.gateway.allowed_workers is not None:
            route = replace(route, allowed_workers=request.gateway.allowed_workers)
        request.route = request.first_route = route
        plan = request.plan = self._plan_of(request, model)
        if plan.phase != "whole":
            self._place(request, plan)
            request.route = self.route_of(request, plan)

    def _plan_of(self, request: "FleetRequest", model: _ResolvedModel) -> RequestPlan:
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
            now_s = self._routing.clock.now()
            roles = self._routing.state.model_view(route.model, route.block_size, route.hash_scheme, now_s).roles
            # for one token no KV would be fetched
            phase = first_phase(roles, may_split=self._splits_prompts and is_one and route.max_tokens != 1)
        if inbound.stream and is_one and route.isl_tokens <= _MIGRATED_TOKENS_MAX and not inbound.is_guided:
            migrations = failures.migration_limit
        return RequestPlan(phase, retry_limit=retry_limit, migration_limit=migrations)

    def _place(self, request: "FleetRequest", plan: RequestPlan) -> None:
        """Compute the prompt at the decode worker if the configuration and the state of the fleet say so."""
        if self._conditional.policy == "off" or plan.phase != "prefill" or plan.is_fixed:
            return
        try:
            verdict = self._routing.decide(self.route_of(request, plan.beside("alone")))
        except (NoEligibleWorker, WorkerNotNamed):
            return
        placed = placement(verdict, self._conditional)
        self._metrics.placed(placed.reason)
        if placed.is_local:
            plan.compute_at_decode()

    def _model(self, name: str) -> _ResolvedModel:
        fleet, now_s = self._routing.state.fleet, self._routing.clock.now()
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

    def route_of(self, request: "FleetRequest", plan: RequestPlan) -> RouteRequest:
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
            prefill = None if rank is None else self._routing.state.fleet.worker(rank.worker_id)
            pins = {"session_id": "", "prefill_worker": "" if prefill is None else prefill.registration.worker_id}
            pins["transfer_domain"] = None if prefill is None else prefill.registration.transfer_domain
        return replace(request.first_route, phase=phase, tried=plan.tried, decision_id=self._new_id(), **pins)
