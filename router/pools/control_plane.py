"""The control plane of `router pools`. Beyond loopback a token guards it.

GET /v1/pools                                     every pool: where, within which limits, how it stands and why
GET /metrics, /health, /live, /ready, /version
"""

from importlib.metadata import version

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, openai_errors
from kv_runtime.http.metrics import metrics_handler
from router.pools.selection import PoolGroup
from router.pools.service import PoolService


class PoolControl:
    """The endpoints for operators."""

    def __init__(self, service: PoolService) -> None:
        self._service = service

    def app(self, registry: CollectorRegistry, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors, require_token(token)])
        app.add_routes(
            [
                web.get("/v1/pools", self._pools),
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/ready", self._ready),
                web.get("/version", self._version),
                web.get("/metrics", metrics_handler(registry)),
            ]
        )
        return app

    async def _pools(self, _: web.Request) -> web.Response:
        service = self._service
        groups = [{"phase": each.phase, "pools": self._pools_of(each)} for each in service.config.groups]
        summary = {
            "mode": service.config.mode,
            "enable_priority_retry": service.config.retry,
            "identity": service.identity,
        }
        return json_response({**summary, "groups": groups})

    def _pools_of(self, group: PoolGroup) -> list[dict[str, object]]:
        return [
            {
                "pool": index,
                "priority": group.priorities[index],
                **msgspec.structs.asdict(self._service.live.status(name)),
                **msgspec.structs.asdict(self._service.config.pools[name]),
            }
            for index, name in enumerate(group.namespaces)
        ]

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        readiness = self._service.readiness()
        return json_response(readiness._asdict(), status=200 if readiness.ready else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": version("kv-router")})
