"""The control plane's HTTP API: decisions, workers, index, policy. Beyond loopback a token guards it.

`ControlPlane.app` lists the endpoints, docs/WIRE.md says what each takes and answers. Endpoints of other parts are in
`router/drain/routes.py`, `router/planner/service.py`, `router/shadows/service.py`, `router/attribution/service.py`,
`router/live/routes.py`, `indexer/service/routes.py` and `router/web/__init__.py`.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from indexer.embedded import EmbeddedIndex, NodeUse, OutlineNode, PassedRequest
from kv_protocol import fleet, subjects
from kv_protocol.decision import ADDENDS
from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.events import TIERS
from kv_protocol.fleet import NO_EVENTS, REMOVED_BY_HAND, FleetEvent, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.errors import as_json
from kv_protocol.splitmix import U64_MASK
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.http.access import OPEN_PATHS, require_token
from kv_runtime.http.answers import error_response, json_response, large_json_response, life_routes, openai_errors
from kv_runtime.http.metrics import metrics_handler
from router.decision.policy_store import PolicyNotStored, PolicyStore, fields_of, swapped
from router.decision.report import DecisionReport, Outcome, explanation, misses, predicted_cached_tokens, sentence
from router.decision.routing import Lease, Routing
from router.drain.handover import Handover
from router.drain.routes import WAIT_S_MAX, DrainRoutes, unknown_worker
from router.engine_attacher import EngineAttacher
from router.fleet.registry import Worker
from router.fleet.trust import ENOUGH, WINDOW, Disparity, Trust
from router.live.fleet import USED_MAX, listed, outcome_fields, uses, warmth
from router.live.routes import json_route, list_limit, number_of, seconds_of, unix_time
from router.prompt.chains import KeptPrompts
from router.shadows.service import Shadows
from router.web import PATHS, page_routes

_log = structlog.get_logger("router")
_BODY_BYTES_MAX = 1 << 20
"""Largest body: a registration, a policy, shadows."""
_OF_A_REQUEST_MAX = 16
"""How many decisions of one request are shown: its phases and retries."""
_ROWS_AT_ONCE = 256
"""How many workers are rendered before the event loop gets a turn: some 3 ms."""
_ENOUGH = {"window": WINDOW, "enough": ENOUGH}
_NOT_REGISTERED = Trust("FALLBACK", "its worker is not registered")


class _EngineUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: str


def _engine_url(body: bytes) -> str:
    """Return the address in `{"url": ...}`; empty: the body is something else."""
    with suppress(*UNDECODABLE):
        return msgspec.json.decode(body, type=_EngineUrl).url
    return ""


class ControlPlane:
    """The endpoints for operators."""

    def __init__(
        self,
        routing: Routing,
        index: EmbeddedIndex,
        log: EventLog,
        handover: Handover,
        gate: FleetGate | None = None,
        policies: PolicyStore | None = None,
        *,
        trace_link: str = "",
        shadows: Shadows | None = None,
        kept: KeptPrompts | None = None,
        differs: Callable[[str, str], Sequence[Disparity]] = lambda _worker_id, _instance: (),
        attacher: EngineAttacher | None = None,
        watched: Sequence[web.RouteDef] = (),
    ) -> None:
        """Without `shadows` the endpoints of shadows are missing.

        gate          the gate of this router's feeds
        policies      without it, a policy that is changed lasts until the router ends
        trace_link    `tracing.link` of the settings
        kept          the prompts that are shown with decisions; without it no prompt is shown
        differs       `differs(worker_id, instance)` returns how that instance of a worker differs from this router
        attacher      attaches engines to this process; None: it attaches none
        watched       further routes that only show: planner, report, `router/live/`
        """
        self._trace_link, self._differs = trace_link, differs
        self._policies = policies or PolicyStore("", routing.policy, routing.state.modes)
        self._routing, self._index, self._event_log = routing, index, log
        self._gate = FleetGate() if gate is None else gate
        self._shadows, self._watched, self._kept = shadows, watched, kept
        self._attacher = attacher
        self._drains = DrainRoutes(routing, handover, self._publish)

    def app(self, registry: CollectorRegistry, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        routes = [
            web.get("/metrics", metrics_handler(registry)),
            web.get("/v1/decisions", self._decisions),
            web.get("/v1/decisions/{id}", self._decision),
            web.get("/v1/workers", self.workers),
            web.post("/v1/workers", self._add_worker),
            *self._drains.routes(),
            web.delete("/v1/workers/{id}", self._remove_worker),
            web.get("/v1/index", self._index_view),
            web.get("/v1/index/position", self._position),
            *self._index.routes(self._heat, self._uses),
            json_route("/v1/policy", lambda: fields_of(self._routing.policy)),
            *(web.route(method, "/v1/policy", self._change_policy) for method in ("PUT", "PATCH", "DELETE")),
            *([] if self._shadows is None else self._shadows.routes()),
            json_route("/v1/predictions", lambda: {**_ENOUGH, "ranks": self._routing.calibration.rows()}),
            *self._watched,
            *life_routes(lambda: self._routing.readiness()._asdict()),
        ]
        return control_app(routes, token=token)

    async def _decisions(self, request: web.Request) -> web.Response:
        query = request.query
        return json_response(listed(self._routing, query, list_limit(query), unix_time(query)))

    async def _decision(self, request: web.Request) -> web.Response:
        record = self._routing.decisions.find(request.match_info["id"])
        if record is None:
            message = f"id: found {as_json(request.match_info['id'])}, allowed a request or decision among the newest"
            return error_response(404, message, param="id")
        route = record.verdict.request
        same_request = self._routing.decisions.of_request(route.request_id, _OF_A_REQUEST_MAX)
        begun_s = same_request[0].verdict.now_s
        beside = {
            "addends": {name: each._asdict() for name, each in ADDENDS.items()},
            "shadows": [] if self._shadows is None else self._shadows.beside(record.verdict),
            "prompt": None if self._kept is None else self._kept.text(route.decision_id),
        }

        def made() -> dict[str, object]:
            decisions = [_explained(each, begun_s, self._trace_link) for each in same_request]
            return {**_explained(record, begun_s, self._trace_link), "decisions": decisions, **beside}

        return await large_json_response(made)

    async def workers(self, _: web.Request) -> web.Response:
        """Answer with the fleet, and the trust in each rank."""
        known, now_s = self._routing.state.fleet, self._routing.clock.now()
        parity, trust, breakers = known.parity(now_s), self._routing.trust(), self._routing.state.breakers
        evidence = self._routing.calibration.evidence

        def shown(worker: Worker) -> dict[str, object]:
            registration, unfit = worker.registration, known.unfit(worker, now_s)
            ranks = [
                {
                    **_trusted(rank, trust[rank]),
                    "evidence": None if (move := evidence.get(rank)) is None else move.evidence(),
                    "unfit": breakers.unfit(rank, now_s),
                    "event_flag": (registration.event_flag or "") if trust[rank].reason.startswith(NO_EVENTS) else "",
                }
                for rank in registration.ranks
            ]
            reasons = [str(rank["unfit"]) for rank in ranks]
            of_all = reasons[0] if all(reasons) else ""
            differs = *parity[registration.worker_id], *self._differs(registration.worker_id, registration.instance)
            return {
                "unfit": unfit or of_all,
                "draining": worker.draining,
                "ranks": ranks,
                "differs": [each._asdict() for each in differs],
                "registration": registration,
            }

        rows = []
        for number, worker in enumerate(list(known.workers()), 1):
            rows.append(shown(worker))
            if number % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        waiting = [] if self._attacher is None else self._attacher.waiting()
        return await large_json_response(lambda: {"workers": rows, "waiting": waiting})

    async def _add_worker(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self._attacher is not None and (url := _engine_url(body)):
            try:
                return json_response({"worker_id": self._attacher.add(url)}, status=202)
            except ValueError as error:
                return error_response(400, f"url: {error}", param="url")
        try:
            event = fleet.decode_fleet_event(body)
        except MalformedMessage as error:
            return error_response(400, str(error))
        if not isinstance(event, WorkerRegistered):
            return error_response(400, "type: found another event, allowed registered")
        return await self._say(event.model, event)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["id"]
        if self._attacher is not None and self._attacher.remove(worker_id):
            return json_response({"worker_id": worker_id}, status=202)
        worker = self._routing.state.fleet.worker(worker_id)
        if worker is None:
            return unknown_worker(worker_id)
        registration = worker.registration
        return await self._say(
            registration.model,
            WorkerLeft(worker_id=registration.worker_id, instance=registration.instance, reason=REMOVED_BY_HAND),
        )

    async def _say(self, model: str, event: FleetEvent) -> web.Response:
        refused = await self._publish(model, event)
        return json_response({"published": event}, status=202) if refused is None else refused

    async def _publish(self, model: str, event: FleetEvent) -> web.Response | None:
        """Publish the event, signed if the fleet has keys; return an error response if that fails."""
        subject, data = subjects.fleet(model, event.worker_id), fleet.encode(event)
        try:
            self._gate.check(subject, event)
            headers = self._gate.headers(subject, event.worker_id, data, self._routing.clock.wall_ns())
            await self._event_log.publish(subject, data, headers=headers)
        except FleetEventRefused as error:
            return error_response(409, str(error), param=error.reason)
        except BrokerUnavailable as error:
            message = f"{error}; it may take effect later, if NATS received it: see /v1/workers once NATS answers"
            return error_response(503, message, code="log_unavailable")
        return None

    async def _index_view(self, _: web.Request) -> web.Response:
        index, trust = self._index, self._routing.trust()
        statistics = index.statistics()
        refused = {str(rank): reason for rank, reason in index.refused_ranks().items()}
        routed = {str(WorkerRank(*rank)): blocks for rank, blocks in self._routing.state.core.routed_blocks()}

        def made() -> dict[str, object]:
            ranks = [
                {
                    **_trusted(rank, trust.get(rank, _NOT_REGISTERED)),
                    "blocks": {tier.name.lower(): statistics.blocks[rank][tier] for tier in TIERS},
                    **msgspec.structs.asdict(stream),
                }
                for rank, stream in statistics.streams.items()
            ]
            return {"index": statistics.index, "ranks": ranks, "refused": refused, "approximate_blocks": routed}

        return await large_json_response(made)

    async def _position(self, request: web.Request) -> web.Response:
        fields = (("dp_rank", "0"), ("epoch", ""), ("seq", ""))
        numbers = {field: number_of(request.query, field, default, 0, U64_MASK) for field, default in fields}
        timeout_s = seconds_of("timeout_s", request.query.get("timeout_s", "5"), "seconds", least=-sys.float_info.max)
        rank = WorkerRank(request.query.get("worker", ""), numbers["dp_rank"])
        try:
            async with asyncio.timeout(min(max(timeout_s, 0.0), WAIT_S_MAX)):
                await self._index.wait_for(rank, numbers["epoch"], numbers["seq"])
        except TimeoutError:
            message = f"{rank} is not at seq {numbers['seq']} of epoch {numbers['epoch']} after {timeout_s} s"
            return error_response(504, message, code="not_reached")
        return json_response({"reached": True})

    async def _heat(self) -> list[PassedRequest]:
        return warmth(self._routing.state.core.ends(), self._routing.clock.now())

    def _uses(self, nodes: Sequence[OutlineNode]) -> list[NodeUse]:
        return uses(nodes, self._routing.decisions.newest(USED_MAX), self._kept)

    async def _change_policy(self, request: web.Request) -> web.Response:
        """Put the named fields in force; with PUT all others get their defaults; DELETE: the configured policy."""
        routing, policies = self._routing, self._policies
        body = await request.read()
        async with policies.writing:
            try:
                if request.method == "DELETE":
                    policy = policies.configured
                    await policies.clear()
                else:
                    named, replaces = msgspec.json.decode(body, type=dict[str, Any]), request.method == "PUT"
                    policy = swapped(routing.policy, named, routing.state.modes, replace_all=replaces)
                    changed = fields_of(policy)
                    await policies.keep(changed if replaces else {name: changed[name] for name in named})
            except UNDECODABLE as error:
                return error_response(400, f"body: {error}", param="body")
            except ConfigurationError as error:
                return error_response(400, "; ".join(error.problems), param="policy")
            except PolicyNotStored as error:
                return error_response(503, str(error), code="not_stored")
            before, now = fields_of(routing.policy), fields_of(policy)
            routing.set_policy(policy)
            _log.info("policy_changed", **{name: value for name, value in now.items() if value != before[name]})
            return json_response(now)


def control_app(routes: Sequence[web.RouteDef], *, token: str) -> web.Application:
    """Return an application of these routes, guarded by the token, and of the web page."""
    guard = require_token(token, OPEN_PATHS | PATHS)
    app = web.Application(middlewares=[openai_errors, guard], client_max_size=_BODY_BYTES_MAX)
    app.add_routes([*routes, *page_routes()])
    return app


def _explained(record: Lease, begun_s: float, trace_link: str) -> dict[str, object]:
    """Return a decision with every candidate, its prediction beside its outcome, and the link to its trace."""
    decision = record.decision
    outcome = None if record.outcome is None else msgspec.convert(record.outcome, Outcome, from_attributes=True)
    for name in ("request_id", "decision_id"):
        trace_link = trace_link.replace(f"{{{name}}}", quote(getattr(decision, name), safe=""))
    return {
        "decision": decision,
        "outcome": outcome_fields(record.outcome),
        "explanation": explanation(decision),
        "sentence": sentence(DecisionReport(decision=decision, outcome=outcome)),
        "predicted": {"cached_tokens": predicted_cached_tokens(decision), "ttft_s": decision.chosen.predicted_ttft_s},
        "misses": misses(decision, record.outcome, begun_s),
        "trace_url": trace_link or None,
    }


def _trusted(rank: WorkerRank, trust: Trust) -> dict[str, object]:
    """Return the rank with the trust in it."""
    return {**rank._asdict(), "trust": trust.state, "trust_reason": trust.reason}
