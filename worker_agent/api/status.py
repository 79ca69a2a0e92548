"""The HTTP API of a process that publishes streams and serves no requests.

GET /health, /live, /status    whether the log is connected, every rank's position, and why its set may be wrong
GET /version, /metrics
"""

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, openai_errors
from kv_runtime.http.metrics import metrics_handler
from worker_agent.events.consolidator import Consolidator


def streams_status(consolidators: Sequence[Consolidator]) -> dict[str, Any]:
    """Return the streams' positions; `log` is `away` while it is disconnected, and batches wait."""
    is_away = any(each.is_log_away for each in consolidators)
    return {
        "log": "away" if is_away else "connected",
        "ranks": [
            {
                "worker_id": each.worker_id,
                "dp_rank": dp_rank,
                "epoch": rank.epoch,
                "seq": rank.last_seq,
                "published_seq": rank.published_seq,
                "waiting_bytes": rank.waiting_bytes,
                "dropped_batches": rank.dropped_batches_total,
                "is_refused": each.streams[dp_rank].is_refused,
                "stale": each.stale(dp_rank),
            }
            for each in consolidators
            for dp_rank, rank in each.core.statistics().ranks.items()
        ],
    }


class StatusApi:
    """The endpoints. The process is healthy while it answers; stale ranks do not make it unhealthy."""

    def __init__(
        self,
        consolidators: Callable[[], Sequence[Consolidator]],
        version: str,
        *,
        sources: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        """`sources` returns the status of the sources that this process polls."""
        self._consolidators, self._version, self._sources = consolidators, version, sources

    def app(self, registry: CollectorRegistry, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors, require_token(token)])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/status", self._health),
                web.get("/version", self._show_version),
                web.get("/metrics", metrics_handler(registry)),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok", **streams_status(self._consolidators()), "sources": self._sources()})

    async def _show_version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._version})
