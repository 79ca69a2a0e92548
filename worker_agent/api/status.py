"""The HTTP API of a process that publishes streams and serves no requests.

GET /health, /live, /status    whether the log is connected, every rank's position, and why its set may be wrong
GET /version, /metrics
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

from aiohttp import web

from kv_runtime.config.sections import ControlSection
from kv_runtime.event_log import EventLog, log_families
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, openai_errors
from kv_runtime.http.connection_limit import CONTROL_CONNECTIONS_MAX
from kv_runtime.http.metrics import metrics_handler
from kv_runtime.http.server import HttpServer
from kv_runtime.telemetry import Family, Projection, new_registry
from kv_runtime.tracing.exporter import span_families
from kv_runtime.tracing.service import Tracing
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.metrics import consolidator_families


def streams_status(consolidators: Sequence[Consolidator]) -> dict[str, Any]:
    """Return the streams' positions; `log` is `away` while it is disconnected, and batches wait."""
    is_away = any(each.is_log_away for each in consolidators)
    return {
        "log": "away" if is_away else "connected",
        "ranks": [
            {
                "worker_id": each.worker_id,
                "dp_rank": dp_rank,
                "epoch": outbox.epoch,
                "seq": outbox.last_seq,
                "published_seq": outbox.published_seq,
                "waiting_bytes": outbox.waiting_bytes,
                "dropped_batches": outbox.dropped_batches_total,
                "is_refused": each.streams[dp_rank].is_refused,
                "stale": each.stale(dp_rank),
            }
            for each in consolidators
            for dp_rank in each.core.dp_ranks
            for outbox in [each.core.outbox(dp_rank)]
        ],
    }


def status_server(
    control: ControlSection,
    log: EventLog,
    tracing: Tracing | None,
    consolidators: Callable[[], Sequence[Consolidator]],
    *,
    families: Callable[[], Iterable[Family]],
    sources: Callable[[], list[dict[str, Any]]],
) -> HttpServer:
    """Return the server, not started. The process is healthy while it answers; stale ranks do not make it unhealthy.

    `families` are further metrics; `sources` returns the status of the sources that this process polls.
    """
    registry = new_registry()
    Projection(registry, lambda: consolidator_families(consolidators()))
    Projection(registry, families)
    Projection(registry, lambda: log_families(log.statistics()))
    Projection(registry, lambda: span_families(None if tracing is None else tracing.exporter))

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "ok", **streams_status(consolidators()), "sources": sources()})

    async def shown_version(_: web.Request) -> web.Response:
        return json_response({"version": version("kv-router")})

    app = web.Application(middlewares=[openai_errors, require_token(control.token.get_secret_value())])
    app.add_routes([web.get(path, health) for path in ("/health", "/live", "/status")])
    app.add_routes([web.get("/version", shown_version), web.get("/metrics", metrics_handler(registry))])
    hosts = control.host_names()
    return HttpServer(app, control.host, control.port, hosts=hosts, connections_max=CONTROL_CONNECTIONS_MAX)
