"""Reads requests: body, prompt, routing fields, and the phases in which the present fleet serves them.

A plain request is a chat or completion that states no wishes (`UNCOMMON_KEYS`, `WISHING_HEADERS`): plain requests for a
model share route and plan. The fields of any other request are read one by one.
"""

import sys
import uuid
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr, replace

from kv_protocol.body_limits import SCANNED_BYTES, Body, BodyLimits, Bytes, read_body
from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import Hashing, hash_seed
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, PROMPT_ENDPOINTS, stated_words
from kv_protocol.openai.errors import as_json
from kv_protocol.openai.inbound import (
    UNCOMMON_KEYS,
    ChatInbound,
    CompletionInbound,
    Inbound,
    passed_form,
)
from kv_protocol.openai.parts import LONG_BYTES
from kv_protocol.openai.requests import RequestInvalid, check_utf8, decode_inbound, decode_passed
from router.config import RouterSettings
from router.decision.disaggregation import AT_DECODE, placement, requested_phase
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import RequestPlan, first_phase
from router.decision.routing import Routing
from router.http import refusals
from router.http.refusals import Refusal, RequestRejected
from router.metrics import RequestMetrics
from router.native import built
from router.prompt.chains import EncodedPrompt
from router.prompt.encoding_pool import EncodingPool
from router.prompt.prompts import ModelPrompts
from router.queue.tenants import TenantNames
from router.request.destination import Destination, RankAttempt
from router.request.route_request import WISHING_HEADERS, name_in, plain_route, wishes

if TYPE_CHECKING:
    import asyncio

    from router.request.serving import FleetRequest

_BEGINNING = 64
"""How far to look for the `{` of a JSON body."""
MODE_OF_PASSED = "other"
"""The mode, in metrics and logs, of requests to other paths, which are passed on as they are."""
_MIGRATED_TOKENS_MAX = 1 << 20
"""Longer prompts do not migrate: to compute one again would take a worker for minutes."""
_ONCE = RequestPlan("whole", retry_limit=0)
_UNREAD = EncodedPrompt(b"", 0, Hashing(1), b"")
PLAIN = (ChatInbound(model=""), CompletionInbound(model=""))
"""Plain requests of each type."""

ReadBody = tuple[Body, Inbound]
"""A request body, and the fields that the router reads of it."""


def decode_request(path: str, body: Bytes) -> Inbound:
    """Return the request in `body`; raise `RequestInvalid`, as `decode_inbound` does.

    A long body (`LONG_BYTES`) is decoded without its prompt, which stays bytes.
    """
    found = built.prompt_in(body) if len(body) > LONG_BYTES else None
    if found is None:
        return decode_inbound(path, body)
    key, begin, end, rest = found
    check_utf8(body)
    try:
        inbound = decode_inbound(path, rest)
    except RequestInvalid:
        return decode_inbound(path, body)  # it names the error's place in the whole body
    if key in inbound.__struct_fields__:
        force_setattr(inbound, key, msgspec.Raw(memoryview(body)[begin:end]))
    return inbound


class BodyParser:
    """Parses JSON bodies of requests. The data plane bounds the bodies that wait: `data.bodies_bytes_max`.

    SCANNED_BYTES at most    decoded on the event loop: a few milliseconds at worst
    larger                   scanned, its images cut out, decoded: on a thread (`kv_protocol/body_limits.py`)

    Other threads encode prompts, so that a body never waits for another request's prompt. Bodies of more than 1 MiB
    have a thread of their own.
    """

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._pool = EncodingPool(1, sys.maxsize)

    def read(
        self, path: str, data: Bytes, decode: Callable[[str, Bytes], Inbound] = decode_request
    ) -> "ReadBody | asyncio.Future[ReadBody]":
        """Return the parsed body of a request to `path`, or its future.

        Raises (also the future):
            RequestInvalid: it is no request; `BodyTooLarge`: it exceeds a bound.
        """
        if len(data) <= SCANNED_BYTES:
            return Body(data), decode(path, data)

        def read_large() -> ReadBody:
            body = read_body(data, self._limits, uuid.uuid4().hex)
            return body, decode(path, body.text)

        return self._pool.submit(read_large, len(data))


class _ServedModel(msgspec.Struct, frozen=True):
    """The values that all requests for a model at an endpoint share, until the fleet or a worker's fitness changes."""

    valid_until_s: float
    has_prompts: bool
    """Whether prompts are read."""
    hashing: Hashing
    seed: int
    """Seed of the block hashes of prompts without a salt."""
    images: ImageRule | None
    route: RouteRequest
    """The fields that all plain requests share."""
    is_aggregated: bool
    """Whether every worker computes both prompts and answers: no request has several phases."""


class FleetReader(Destination[RankAttempt]):
    """Reads requests for workers of the fleet. Call `follow_policy` first."""

    _changes = -1
    """The value of `Fleet.changes` for which `_served` is valid."""

    def __init__(
        self,
        routing: Routing,
        prompts: ModelPrompts,
        metrics: RequestMetrics,
        tenants: TenantNames,
        settings: RouterSettings,
        new_id: Callable[[], str],
    ) -> None:
        self.routing, self.metrics, self.new_id = routing, metrics, new_id
        self.bodies = BodyParser(settings.data.body_limits())
        self._state, self._fleet, self._now = routing.state, routing.state.fleet, routing.clock.now
        self._parsed = metrics.observer("parse")
        self._tokenized = metrics.observer("tokenize")
        self._prompts, self._tenants = prompts, tenants
        self._disaggregation = settings.disaggregation
        self._whole = RequestPlan("whole", retry_limit=settings.failures.retry_limit)
        self._resumable = replace(self._whole, migration_limit=settings.failures.migration_limit)
        self._encodes_always = settings.tokens.always
        self._plain = built.PlainRequests(PLAIN, UNCOMMON_KEYS, [*WISHING_HEADERS, *tenants.headers])
        self._served: dict[tuple[str, str], _ServedModel] = {}

    async def read(self, request: "FleetRequest") -> None:
        """Set the request's body, prompt, route and plan.

        Raises:
            RequestInvalid: a field or a header cannot be read.
            RequestRejected: no worker serves the model, or this endpoint of it.
        """
        exchange, began_s = request.exchange, perf_counter()
        data, headers = exchange.body, exchange.headers
        if request.mode == MODE_OF_PASSED:
            body, inbound = await self._read_passed(request)
        elif len(data) <= LONG_BYTES:
            body, inbound = Body(data), decode_inbound(exchange.path, data)
        else:
            body, inbound = await request.later(self.bodies.read(exchange.path, data))
        request.body, request.inbound, request.model = body, inbound, inbound.model
        parsed_s = perf_counter()
        self._parsed(parsed_s - began_s)
        served = self._served.get((inbound.model, inbound.endpoint))
        if served is None or self._changes != self._fleet.changes or self._now() >= served.valid_until_s:
            served = self._resolve(inbound)
        is_plain = request.gateway is None and self._plain.have(inbound, headers)
        prompt = _UNREAD
        if served.has_prompts:
            made = self._prompts.short_chat(inbound, served.hashing, served.seed) if is_plain else None
            if made is None:
                asked = body, inbound, served.hashing, served.route.lora, served.images
                made = await request.later(self._prompts.prompt(*asked))
                is_plain = is_plain and not made.unrendered and made.token_count <= _MIGRATED_TOKENS_MAX
            request.prompt = prompt = made
            self._tokenized(perf_counter() - parsed_s)
            if request.trace is not None:
                request.trace.was_in("prompt", perf_counter() - parsed_s)
        request.route = request.first_route = replace(
            served.route,
            decision_id=self.new_id(),
            request_id=(b"x-request-id" in headers and name_in(headers, b"x-request-id")) or self.new_id(),
            isl_tokens=prompt.token_count,
            sequence_hashes=prompt.sequence_hashes,
            max_tokens=inbound.limit_tokens or 0,
        )
        is_one = request.has_one_choice = (is_plain and inbound.endpoint == "chat") or inbound.has_one_choice
        if is_plain and served.is_aggregated:
            request.plan = self._resumable if inbound.stream and is_one else self._whole
            return
        if not is_plain:
            self._read_wishes(request, served)
        plan = request.plan = self._first_plan(request, served)
        if plan.phase != "whole":
            request.route = self.route_of(request, plan)

    async def _read_passed(self, request: "FleetRequest") -> ReadBody:
        """Return the body of a request that is passed on as it is, parsed if it is JSON.

        If the body names no model, it is for the only model of the workers that state the path.

        Raises:
            RequestInvalid: these workers serve several models.
        """
        exchange = request.exchange
        path, data = exchange.path, exchange.body
        body = Body(data)
        inbound: Inbound = passed_form(path, data)
        if data[:_BEGINNING].lstrip()[:1] == b"{":
            body, inbound = await request.later(self.bodies.read(path, data, decode_passed))
        model = inbound.model
        if not model:
            registrations = [worker.registration for worker in self._fleet.workers()]
            names = {each.served_names[0] for each in registrations if path in each.api_endpoints}
            if len(names) > 1:
                raise RequestInvalid("model", None, f"one of {', '.join(sorted(names))}")
            model = next(iter(names), "")
        return body, replace(inbound, path=f"{path}?{exchange.query}" if exchange.query else path, model=model)

    def follow_policy(self) -> None:
        """Read what the policy in force needs, from now on."""
        reads_prompts = self._encodes_always or self._state.reads_overlap
        self._prompt_endpoints = PROMPT_ENDPOINTS if reads_prompts else frozenset[str]()
        self._served.clear()

    def _resolve(self, inbound: Inbound) -> _ServedModel:
        """Return, and cache, what the present fleet states of a model at an endpoint; raise `RequestRejected`."""
        (name, endpoint), fleet, now_s = (inbound.model, inbound.endpoint), self._fleet, self._now()
        if self._changes != fleet.changes:
            self._changes = fleet.changes
            self._served.clear()
        hashing = fleet.hashing(name, now_s)
        if hashing is None:
            raise RequestRejected(refusals.unknown_model(name, fleet.models()))
        workers = fleet.serving(name)
        endpoints = frozenset(each for worker in workers for each in worker.registration.api_endpoints)
        if endpoint not in endpoints:
            message = f"{inbound.path}: no worker of {as_json(name)} serves it; they state {stated_words(endpoints)}"
            raise RequestRejected(Refusal(404, message, "model", "endpoint_not_served"))
        lora, tenant = fleet.lora_of(name), self._tenants.name(lambda _: None)
        served = self._served[name, endpoint] = _ServedModel(
            fleet.valid_until_s(workers, now_s),
            endpoint in self._prompt_endpoints,
            hashing,
            hash_seed(lora),
            fleet.images(name, now_s),
            replace(plain_route(inbound, hashing), lora=lora, tenant=tenant),
            all(worker.registration.role == "aggregated" for worker in workers),
        )
        return served

    def _read_wishes(self, request: "FleetRequest", served: _ServedModel) -> None:
        """Add what the request wishes to its route; raise `RequestInvalid`."""
        exchange, gateway, prompt = request.exchange, request.gateway, request.prompt
        account = None if exchange.account is None else exchange.account.name
        request.salt = request.inbound.salt
        request.route = request.first_route = replace(
            request.route,
            **wishes(request.inbound, exchange.headers),
            tenant=self._tenants.name(exchange.headers.get, account),
            allowed_workers=None if gateway is None else gateway.allowed_workers,
            hash_scheme=served.hashing.scheme if prompt is None else prompt.hashing.scheme,
        )

    def _first_plan(self, request: "FleetRequest", served: _ServedModel) -> RequestPlan:
        """Return the plan with which the present fleet serves the request; raise `RequestInvalid`."""
        inbound, route = request.inbound, request.route
        is_sent_here = request.gateway is None  # else the gateway sends it: once, and to one worker
        whole, resumable = (self._whole, self._resumable) if is_sent_here else (_ONCE, _ONCE)
        if route.endpoint not in DEFAULT_ENDPOINTS:
            return whole
        if inbound.names_phase:
            phase = requested_phase(bytes(inbound.disaggregated_params), accepted=self._disaggregation.accept_params)
            return RequestPlan(phase, whole.retry_limit, is_fixed=True)
        is_one, is_long = request.has_one_choice, route.isl_tokens > _MIGRATED_TOKENS_MAX
        plan = resumable if inbound.stream and is_one and not (is_long or inbound.is_guided) else whole
        if served.is_aggregated:
            return plan
        view = self._state.model_view(route.model, route.block_size, route.hash_scheme, self._now())
        # a request for one token has no decode phase that would fetch the KV
        may_split = self._disaggregation.enabled and is_sent_here and is_one and route.max_tokens != 1
        phase = first_phase(view.roles, may_split=may_split)
        plan = RequestPlan(phase, plan.retry_limit, plan.migration_limit)
        return self._placed(request, plan) if plan.is_aside and self._disaggregation.conditional != "off" else plan

    def _placed(self, request: "FleetRequest", plan: RequestPlan) -> RequestPlan:
        """Return the plan that `disaggregation.conditional` gives: the decode worker may compute the prompt, too."""
        try:
            verdict = self.routing.decide(self.route_of(request, plan.to("alone")))
        except (NoEligibleWorker, WorkerNotNamed):
            return plan
        reason = placement(verdict, self._disaggregation)
        self.metrics.count("prefill_placements", reason)
        return plan.to("alone") if reason in AT_DECODE else plan

    def route_of(self, request: "FleetRequest", plan: RequestPlan) -> RouteRequest:
        """Return the routing fields for the plan's phase.

        Clients name prefill and decode worker separately. A session is bound to its prefill rank, not to a decode rank.
        """
        phase, extension, pins = plan.phase, request.inbound.extension, dict[str, Any]()
        if phase == "prefill":
            worker = extension.prefill_worker_id
            pins = {"pinned_worker": None if worker is None else str(worker), "prefill_worker": ""}
            pins["pinned_dp_rank"] = extension.prefill_dp_rank
        elif phase == "decode":
            rank = request.prefilled_by
            prefill = None if rank is None else self._fleet.worker(rank.worker_id)
            pins = {"session_id": "", "prefill_worker": "" if prefill is None else prefill.registration.worker_id}
            pins["transfer_domain"] = None if prefill is None else prefill.registration.transfer_domain
        return replace(request.first_route, phase=phase, tried=plan.tried, decision_id=self.new_id(), **pins)
