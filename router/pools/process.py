"""The process of `router pools`: makes its parts and connects them.

data plane     POST /v1/chat/completions, /v1/completions    served by pools (`served.py`)
               POST /v1/pools/select    returns to which pools such a request would go now, and why; forwards nothing
control plane  GET /v1/pools            every pool: its routers, its limits, its status and the reasons of it
               GET /metrics, /health, /live, /ready, /version

`/v1/models` names what pools serve; `/ready` is 503 while a phase has no pool that is up. Beyond loopback a token
guards the control plane. The parts stop in this order: data plane, control plane and probes of routers, the routers of
this process.
"""

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_runtime.clock import Clock
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, life_routes, openai_errors
from kv_runtime.http.metrics import metrics_handler
from kv_runtime.supervise import Part
from kv_runtime.telemetry import LoopLag, Projection, new_registry
from kv_runtime.text.loading import load_text
from router.config import RouterSettings
from router.http.heads import HOP_BY_HOP
from router.http.plane import HttpPlane
from router.http.sites import CORS_HEADERS
from router.metrics import http_families, prompt_families
from router.pools.config import LiveLimits, PoolGroup, PoolsConfig
from router.pools.served import Identity, PoolService
from router.pools.watch import PoolWatch
from router.prompt.prompts import ModelPrompts
from router.request.replies import Replies


def pool_control(service: PoolService, registry: CollectorRegistry, *, token: str) -> web.Application:
    """Return the application of the control plane."""

    async def shown(_: web.Request) -> web.Response:
        config = service.config
        groups = [{"phase": each.phase, "pools": _pools_of(service, each)} for each in config.groups]
        summary = {"mode": config.mode, "enable_priority_retry": config.retry, "identity": service.identity}
        return json_response({**summary, "groups": groups})

    life = life_routes(lambda: service.readiness()._asdict())
    app = web.Application(middlewares=[openai_errors, require_token(token)])
    app.add_routes([web.get("/v1/pools", shown), *life, web.get("/metrics", metrics_handler(registry))])
    return app


def _pools_of(service: PoolService, group: PoolGroup) -> list[dict[str, object]]:
    limits, settings = set(LiveLimits.model_fields), service.config.pools
    return [
        {
            "pool": index,
            "priority": group.priorities[index],
            **msgspec.structs.asdict(service.pools[name].status),
            **settings[name].model_dump(exclude=limits),
            "limits": settings[name].model_dump(include=limits),
        }
        for index, name in enumerate(group.namespaces)
    ]


class PoolsProcess:
    """The parts of the process: `start` binds the addresses, and `parts` returns what is to run."""

    def __init__(self, config: PoolsConfig, identity: Identity, settings: RouterSettings, text: str) -> None:
        """`text` names the tokenizer; empty: lengths are estimated. Raises `TextError` if it cannot be loaded."""
        self._settings, self._clock, self._registry = settings, Clock(), new_registry()
        watch = self.watch = PoolWatch(config, identity.models, self._clock)
        tokens, prompts = settings.tokens, None
        if text:
            loaded = load_text(text, tokens.encoder)
            prompts = ModelPrompts(loaded, cache_bytes_max=tokens.cache_bytes_max, threads=tokens.threads)
        service = PoolService(identity, settings, watch, prompts)
        posts = {"/v1/chat/completions": service.serve, "/v1/completions": service.serve}
        posts["/v1/pools/select"] = service.explain
        replies, data = Replies(posts, lambda: identity.models, service.readiness), settings.data
        self.data = HttpPlane(
            replies,
            data.limits(),
            posts=replies.posts,
            sites=data.sites(),
            credentials=data.credentials(self._clock),
            not_passed_on=HOP_BY_HOP | CORS_HEADERS | {b"x-request-id"},
        )
        app = pool_control(service, self._registry, token=settings.control.token.get_secret_value())
        self.control = settings.control.server(app)
        Projection(self._registry, watch.metrics.families)
        Projection(self._registry, lambda: http_families(self.data))
        if prompts is not None:
            Projection(self._registry, lambda: prompt_families(prompts))

    async def start(self) -> None:
        """Bind the addresses of both planes; raises `PortUsed`."""
        data = self._settings.data
        await self.control.start()
        await self.data.start(data.host, data.port, reuse_port=data.reuse_port)

    def parts(self) -> list[Part]:
        """Return the parts to run; a part stops before those that it depends on."""
        return [
            Part("pools-data-plane", self.data.run, 0, self.data.in_progress),
            Part("credentials", self.data.credentials.run, 1),
            Part("pools-control-plane", self.control.run, 1),
            Part("pool-watch", self.watch.run, 1),
            Part("loop-lag", LoopLag(self._registry, self._clock).run, 1),
        ]

    @property
    def drain_s(self) -> float:
        """Longest time that its parts take to stop."""
        return self._settings.data.drain_s + 2 * self.data.limits.linger_s + 1
