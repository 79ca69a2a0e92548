"""The agent's HTTP API: OpenAI endpoints, health, metrics, and a barrier for readers of its events.

POST /v1/chat/completions, /v1/completions; /v1/responses if the worker registers it
GET  /v1/models, /health, /live, /version, /metrics
GET  /v1/kv/position    each rank's (epoch, last_seq) after all events that the engine flushed before the call
GET  /status            whether the log is connected, and the position of each rank's stream

`/health` and `/live` answer 503 if the engine is dead: {"status": "failed", "reason"}.

A process that publishes streams and serves no requests (`worker-agent attach`):

GET /health, /live, /status    the log's state; each rank's position, and why the blocks known of it may be wrong
GET /version, /metrics
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_protocol.openai.endpoints import PATHS, ApiEndpoint
from kv_protocol.openai.requests import decode_chat, decode_completion
from kv_runtime.config.sections import ControlSection
from kv_runtime.event_log import EventLog, log_families
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, json_response, openai_errors
from kv_runtime.http.metrics import metrics_handler
from kv_runtime.http.server import CONTROL_CONNECTIONS_MAX, HttpServer
from kv_runtime.telemetry import Family, Projection, new_registry
from kv_runtime.tracing.service import Tracing, span_families
from worker_agent.api.completions import Completions
from worker_agent.api.in_flight import Answer, InFlight, WorkerTracer
from worker_agent.api.responses import decode_response
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.metrics import consolidator_families

BARRIER_S = 5.0


class AgentApi:
    """The endpoints of one worker. `fault` returns why its engine is dead; None while it lives."""

    def __init__(
        self,
        completions: Completions,
        *,
        inflight_requests_max: int,
        position: Callable[[], Awaitable[dict[int, tuple[int, int]]]],
        status: Callable[[], dict[str, Any]],
        fault: Callable[[], str | None] = lambda: None,
        tracer: WorkerTracer | None = None,
    ) -> None:
        """`tracer` None: requests have no spans."""
        self.completions = completions
        self._position, self._status, self._fault = position, status, fault
        self.in_flight = InFlight(inflight_requests_max, tracer)

    def app(self, registry: CollectorRegistry, *, token: str, body_bytes_max: int) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors, require_token(token)], client_max_size=body_bytes_max)
        app.add_routes(
            [
                *(web.post(PATHS[name], self.in_flight.serving(answer)) for name, answer in self._answers().items()),
                web.get("/v1/models", self._models),
                web.get("/v1/kv/position", self._kv_position),
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/status", self._show_status),
                web.get("/version", self._version),
                web.get("/metrics", metrics_handler(registry)),
            ]
        )
        return app

    @property
    def api_endpoints(self) -> tuple[str, ...]:
        """The OpenAI endpoints of the worker's registration."""
        return tuple(self._answers())

    def _answers(self) -> dict[ApiEndpoint, Answer]:
        """Return the handler of each endpoint; a worker that serves only one phase has only chat and completions."""
        answered = self.completions.answered
        answers: dict[ApiEndpoint, Answer] = {
            "chat": partial(answered, decode_chat),
            "completions": partial(answered, decode_completion),
        }
        if self.completions.role == "aggregated":
            answers["responses"] = partial(answered, decode_response)
        return answers

    async def _models(self, _: web.Request) -> web.Response:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "kv-router"} for name in self.completions.names
        ]
        return json_response({"object": "list", "data": models})

    async def _kv_position(self, _: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BARRIER_S):
                position = await self._position()
        except TimeoutError:
            message = f"what the engine flushed was not read within {BARRIER_S} s"
            return error_response(504, message, code="not_reached")
        return json_response(
            {"ranks": [{"dp_rank": rank, "epoch": epoch, "seq": seq} for rank, (epoch, seq) in position.items()]}
        )

    async def _health(self, _: web.Request) -> web.Response:
        reason = self._fault()
        if reason is not None:
            return json_response({"status": "failed", "reason": reason}, 503)
        return json_response({"status": "ok", "running_requests": self.in_flight.running})

    async def _show_status(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok", "running_requests": self.in_flight.running, **self._status()})

    async def _version(self, _: web.Request) -> web.Response:
        described = self.completions.description
        return json_response(
            {"agent": version("kv-router"), "engine": described.event_source, "version": described.version}
        )


# ---------------------------------------------------------------- streams
def streams_status(consolidators: Sequence[Consolidator]) -> dict[str, Any]:
    """Return the streams' positions and the sources of events; `log` is `away` while it is disconnected."""
    is_away = any(each.is_log_away for each in consolidators)
    return {
        "log": "away" if is_away else "connected",
        "ranks": [
            {
                "worker_id": each.worker_id,
                "dp_rank": dp_rank,
                "epoch": outbox.epoch,
                "seq": outbox.last_seq,
                "published_seq": outbox.settled_seq,
                "waiting_bytes": outbox.unacked_bytes,
                "dropped_batches": outbox.dropped_batches_total,
                "is_refused": each.streams[dp_rank].is_refused,
                "stale": each.stale(dp_rank),
            }
            for each in consolidators
            for dp_rank in each.core.dp_ranks
            for outbox in [each.core.outboxes[dp_rank]]
        ],
        "sources": [source for each in consolidators for source in each.status()],
    }


def status_server(
    control: ControlSection,
    log: EventLog,
    tracing: Tracing | None,
    consolidators: Callable[[], Sequence[Consolidator]],
    *,
    families: Callable[[], Iterable[Family]],
) -> HttpServer:
    """Return the server, not started. The process is healthy while it answers; stale ranks do not make it unhealthy.

    `families` are further metrics.
    """
    registry = new_registry()
    Projection(registry, lambda: consolidator_families(consolidators()))
    Projection(registry, families)
    Projection(registry, lambda: log_families(log.statistics()))
    Projection(registry, lambda: span_families(None if tracing is None else tracing.exporter))

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "ok", **streams_status(consolidators())})

    async def shown_version(_: web.Request) -> web.Response:
        return json_response({"version": version("kv-router")})

    app = web.Application(middlewares=[openai_errors, require_token(control.token.get_secret_value())])
    app.add_routes([web.get(path, health) for path in ("/health", "/live", "/status")])
    app.add_routes([web.get("/version", shown_version), web.get("/metrics", metrics_handler(registry))])
    hosts = control.host_names()
    return HttpServer(app, control.host, control.port, hosts=hosts, connections_max=CONTROL_CONNECTIONS_MAX)
