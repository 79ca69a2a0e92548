"""The control plane's endpoints for draining a worker.

POST /v1/workers/{id}/drain            {"handover_tokens": N, "handover_s": S}, both optional; returns event and status
GET  /v1/workers/{id}/drain?wait=S     the status, now or, after S seconds at most, once the worker is drained
DELETE /v1/workers/{id}/drain          puts it back: it takes new work, its hand-over ends; refused once its agent stops

No router sends it new requests; the router that was asked hands over the prompts of its own clients.

| state | means |
|---|---|
| serving | registered, and not draining |
| draining | requests still run there, by this router's ledger, or the hand-over is not over |
| drained | no request runs there, and no hand-over: its agent may be stopped |
| left | not registered any more; the status of its hand-over is kept |
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec
import structlog
from aiohttp import web
from msgspec.structs import replace

from indexer.embedded import BadParameter
from kv_protocol.errors import UNDECODABLE
from kv_protocol.fleet import FleetEvent, WorkerDraining
from kv_protocol.journal import FleetApplied
from kv_protocol.openai.errors import as_json
from kv_runtime.http.answers import error_response, json_response
from kv_runtime.supervise import TaskSetFull
from router.decision.routing import Routing
from router.drain.handover import Handover, HandoverStatus, promised_requests
from router.live.routes import seconds_of

TOKENS_MAX = 1 << 30
SECONDS_MAX = 3600.0
WAIT_S_MAX = 60.0
_LOOK_S = 0.05
_FIELDS = ("handover_tokens", "handover_s")

Publish = Callable[[str, FleetEvent], Awaitable[web.Response | None]]
"""Publishes an event of a model's worker; returns an error response if that fails."""
DrainState = Literal["serving", "draining", "drained", "left"]
_log = structlog.get_logger("router")


class DrainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker is drained. `running_requests` were sent to it by all routers, and are not over."""

    worker_id: str
    state: DrainState
    running_requests: int
    handover: HandoverStatus | None


class DrainRoutes:
    """The endpoints."""

    def __init__(self, routing: Routing, handover: Handover, publish: Publish) -> None:
        self._routing, self._handover, self._publish = routing, handover, publish

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes, for an application to add."""
        path = "/v1/workers/{id}/drain"
        return [web.post(path, self._begin), web.get(path, self._show), web.delete(path, self._put_back)]

    async def _begin(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["id"]
        worker = self._routing.state.fleet.worker(worker_id)
        if worker is None:
            return unknown_worker(worker_id)
        tokens, within_s = handover_limits(await request.read(), *self._handover.defaults)
        registration = worker.registration
        event = WorkerDraining(worker_id=worker_id, instance=registration.instance, by_hand=True)
        refused = await self._publish(registration.model, event)
        if refused is not None:
            return refused
        self._routing.apply(FleetApplied(now_s=self._routing.clock.now(), event=event))  # the log brings it again, soon
        if tokens:
            try:
                self._handover.begin(registration, tokens, within_s)
            except TaskSetFull as error:
                message = f"{worker_id} drains, and hands nothing over: {error}; ask again"
                return error_response(503, message, code="overloaded")
        return json_response({"published": event, "drain": self._status(worker_id)}, status=202)

    async def _put_back(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["id"]
        worker = self._routing.state.fleet.worker(worker_id)
        if worker is None:
            return unknown_worker(worker_id)
        if not worker.draining:
            return json_response({"published": None, "drain": self._status(worker_id)})
        if not worker.drained_by_hand:
            message = f"{worker_id} cannot be put back: its agent is stopping; start the agent again"
            return error_response(409, message, param="id", code="agent_stops")
        event = replace(worker.registration, ends_drain=True, drained=False)
        refused = await self._publish(event.model, event)
        if refused is not None:
            return refused
        self._routing.apply(FleetApplied(now_s=self._routing.clock.now(), event=event))  # the log brings it again, soon
        self._handover.cancel(worker_id, "the worker was put back")
        _log.info("drain_ended_by_hand", worker=worker_id)
        return json_response({"published": event, "drain": self._status(worker_id)}, status=202)

    async def _show(self, request: web.Request) -> web.Response:
        worker_id, allowed = request.match_info["id"], f"0..{WAIT_S_MAX:g} seconds"
        wait_s = seconds_of("wait", request.query.get("wait", "0"), allowed, most=WAIT_S_MAX)
        clock = self._routing.clock
        end_s = clock.now() + wait_s
        while (status := self._status(worker_id)) is not None and status.state == "draining" and clock.now() < end_s:
            await clock.sleep(_LOOK_S)
        return unknown_worker(worker_id) if status is None else json_response(status)

    def _status(self, worker_id: str) -> DrainStatus | None:
        """Return the status; None for a worker that is not registered and was never drained here."""
        worker = self._routing.state.fleet.worker(worker_id)
        instance, running = None, 0
        if worker is not None:
            instance = worker.registration.instance
            running = promised_requests(self._routing.state, worker.registration)
        handover = self._handover.status(worker_id, instance)
        is_busy = running or (handover is not None and handover.state != "over")
        state: DrainState = "draining" if is_busy else "drained"
        if worker is None:
            if handover is None:
                return None
            state = "left"
        elif not worker.draining:
            state = "serving"
        return DrainStatus(worker_id=worker_id, state=state, running_requests=running, handover=handover)


def handover_limits(body: bytes, tokens: int, within_s: float) -> tuple[int, float]:
    """Return the tokens and the seconds that a body allows a hand-over; for missing fields, the given values.

    Raises:
        BadParameter: a value is invalid.
    """
    try:
        named = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
    except UNDECODABLE as error:
        raise BadParameter("body", body[:64].decode("utf-8", "replace"), f"a JSON object ({error})") from error
    for name in named:
        if name not in _FIELDS:
            raise BadParameter(name, named[name], " and ".join(_FIELDS))
    tokens, seconds = named.get("handover_tokens", tokens), named.get("handover_s", within_s)
    if type(tokens) is not int or not 0 <= tokens <= TOKENS_MAX:
        raise BadParameter("handover_tokens", tokens, f"0..{TOKENS_MAX}")
    if type(seconds) not in (int, float) or not 0 < seconds <= SECONDS_MAX:
        raise BadParameter("handover_s", seconds, f"more than 0, {SECONDS_MAX:g} at most")
    return tokens, float(seconds)


def unknown_worker(worker_id: str) -> web.Response:
    """Return the error response for a worker that is not registered."""
    message = f"id: found {as_json(worker_id)}, allowed a registered worker"
    return error_response(404, message, param="id")
