"""HTTP of a process that heads streams and serves no requests.

GET /health, /live    every rank's place, and why it may be wrong     GET /version, /metrics
"""

from collections.abc import Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_runtime.http import json_response, metrics_handler, openai_errors, require_token
from worker_agent.consolidator import Consolidator


class StatusApi:
    """The endpoints. The process is healthy while it answers; a stale rank is a publisher's fault."""

    def __init__(self, consolidators: Sequence[Consolidator], version: str) -> None:
        self._consolidators, self._version = tuple(consolidators), version

    def app(self, registry: CollectorRegistry, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors, require_token(token)])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/version", self._show_version),
                web.get("/metrics", metrics_handler(registry)),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        ranks = [
            {
                "worker_id": each.worker_id,
                "dp_rank": dp_rank,
                "epoch": each.core.outbox(dp_rank).epoch,
                "seq": each.core.outbox(dp_rank).last_seq,
                "stale": each.stale(dp_rank),
            }
            for each in self._consolidators
            for dp_rank in each.core.dp_ranks
        ]
        return json_response({"status": "ok", "ranks": ranks})

    async def _show_version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._version})
