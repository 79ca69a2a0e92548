"""Reads requests: body, prompt, routing fields, and the phases in which the present fleet serves them."""

from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kv_protocol.body_limits import SCANNED_BYTES, Body
from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import Hashing
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, PROMPT_ENDPOINTS
from kv_protocol.openai.requests import decode_inbound
from router.config import RouterSettings
from router.decision.disaggregation import placement, requested_phase
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import RequestPlan, first_phase, first_plan
from router.decision.routing import Routing
from router.http import refusals
from router.http.refusals import RequestRejected
from router.metrics.request import RequestMetrics
from router.prompt.chains import EncodedPrompt
from router.prompt.prompts import ModelPrompts
from router.queue.tenants import TenantNames
from router.request.bodies import BodyParser
from router.request.passed import MODE as PASSED
from router.request.passed import read_passed
from router.request.route_request import route_request

if TYPE_CHECKING:
    from router.request.serving import FleetRequest

_MIGRATED_TOKENS_MAX = 1 << 20
"""Longer prompts do not migrate: to compute one again would take a worker for minutes."""


_ONCE = first_plan("whole", retry_limit=0)


class _ResolvedModel(NamedTuple):
    """A model's name resolved, valid until the fleet changes or a worker's fitness expires."""

    hashing: Hashing
    lora: str
    images: ImageRule | None
    changes: int
    """Of the fleet, so far."""
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
        failures, disaggregation = settings.failures, settings.disaggregation
        self._whole = first_plan("whole", retry_limit=failures.retry_limit)
        self._resumable = replace(self._whole, migration_limit=failures.migration_limit)
        self._splits_prompts, self._accepts_params = disaggregation.enabled, disaggregation.accept_params
        self._encodes_always = settings.tokens.always
        self._models: dict[str, _ResolvedModel] = {}

    async def read(self, request: "FleetRequest") -> None:
        """Set the request's body, prompt, route and plan.

        Raises:
            RequestInvalid: a field or a header cannot be read.
            RequestRejected: no worker serves the model, or this endpoint of it.
        """
        exchange, metrics, routing, began_s = request.exchange, self._metrics, self._routing, perf_counter()
        headers, data = exchange.headers, exchange.body
        reads_prompts = self._encodes_always or routing.state.reads_overlap
        decode = self._prompts.decode if reads_prompts else decode_inbound
        if request.mode == PASSED:
            body, inbound = await read_passed(request, self.bodies, routing.state.fleet)
        elif len(data) <= SCANNED_BYTES:
            body, inbound = Body(data), decode(exchange.path, data)
        else:
            body, inbound = await request.later(self.bodies.read(exchange.path, data, decode))
        parsed_s = perf_counter()
        metrics.parsed(parsed_s - began_s)
        request.body, request.inbound = body, inbound
        name = request.model = inbound.model or ""
        model, prompt = self._models.get(name), None
        if model is None or model.changes != routing.state.fleet.changes or routing.clock.now() >= model.valid_until_s:
            model = self._resolve(name)
        endpoint, hashing = inbound.endpoint, model.hashing
        if endpoint not in model.endpoints:
            raise RequestRejected(refusals.endpoint_not_served(inbound.path, name, model.endpoints))
        if reads_prompts and endpoint in PROMPT_ENDPOINTS:
            made = self._prompts.prompt(body, inbound, hashing, model.lora, model.images)
            if isinstance(made, EncodedPrompt):
                prompt = made
            else:
                encoding: Coroutine[Any, Any, EncodedPrompt] = request.later(made)
                del made  # its error would refer to itself
                prompt = await encoding
            hashing, prompt_s = prompt.hashing, perf_counter() - parsed_s
            metrics.tokenized(prompt_s)
            if request.trace is not None:
                request.trace.prompted(prompt_s)
        request.prompt = prompt
        request.route = request.first_route = route_request(
            self._new_id,
            inbound,
            headers,
            hashing,
            prompt,
            lora=model.lora,
            tenant=self._tenants.name(headers.get, None if exchange.account is None else exchange.account.name),
            allowed_workers=None if request.gateway is None else request.gateway.allowed_workers,
        )
        plan = request.plan = self._plan_of(request, model)
        if plan.phase != "whole":
            request.plan = self._placed(request, plan)
            request.route = self.route_of(request, request.plan)

    def _plan_of(self, request: "FleetRequest", model: _ResolvedModel) -> RequestPlan:
        """Return the phases in which the present fleet serves the request; raise `RequestInvalid`."""
        inbound, route = request.inbound, request.route
        is_sent_here = request.gateway is None  # else once, and to one worker
        whole, resumable = (self._whole, self._resumable) if is_sent_here else (_ONCE, _ONCE)
        if route.endpoint not in DEFAULT_ENDPOINTS:
            return whole
        is_one = inbound.is_plain
        if not is_one:
            if inbound.names_phase:
                phase = requested_phase(bytes(inbound.disaggregated_params), accepted=self._accepts_params)
                return first_plan(phase, retry_limit=whole.retry_limit, fixed=True)
            is_one = inbound.has_one_choice
        is_long = route.isl_tokens > _MIGRATED_TOKENS_MAX
        plan = resumable if inbound.stream and is_one and not (is_long or inbound.is_guided) else whole
        if model.is_aggregated:
            return plan
        now_s = self._routing.clock.now()
        roles = self._routing.state.model_view(route.model, route.block_size, route.hash_scheme, now_s).roles
        # for one token no KV would be fetched
        phase = first_phase(roles, may_split=self._splits_prompts and is_sent_here and is_one and route.max_tokens != 1)
        return first_plan(phase, retry_limit=plan.retry_limit, migration_limit=plan.migration_limit)

    def _placed(self, request: "FleetRequest", plan: RequestPlan) -> RequestPlan:
        """Have the decode worker compute the prompt if the configuration and the state of the fleet say so."""
        if self._conditional.policy == "off" or not plan.is_aside:
            return plan
        try:
            verdict = self._routing.decide(self.route_of(request, plan.beside("alone")))
        except (NoEligibleWorker, WorkerNotNamed):
            return plan
        placed = placement(verdict, self._conditional)
        self._metrics.placed(placed.reason)
        return plan.computed_at_decode() if placed.is_local else plan

    def _resolve(self, name: str) -> _ResolvedModel:
        """Return what the present fleet says of a model."""
        fleet, now_s = self._routing.state.fleet, self._routing.clock.now()
        hashing = fleet.hashing(name, now_s)
        if hashing is None:
            self._models.pop(name, None)
            raise RequestRejected(refusals.unknown_model(name, fleet.models()))
        workers = fleet.serving(name)
        known = self._models[name] = _ResolvedModel(
            hashing,
            fleet.lora_of(name),
            fleet.images(name, now_s),
            fleet.changes,
            fleet.valid_until_s(workers, now_s),
            frozenset(each for worker in workers for each in worker.registration.api_endpoints),
            all(worker.registration.role == "aggregated" for worker in workers),
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
