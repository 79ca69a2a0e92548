"""The endpoints of `router pools`, beside those of every data plane (`router/request/replies.py`).

data plane     POST /v1/chat/completions, /v1/completions    served by pools (`served.py`)
               POST /v1/pools/select    which pools such a request would be for now, and why: nothing is forwarded
control plane  GET /v1/pools            every pool: where, within which limits, how it stands and why
               GET /metrics, /health, /live, /ready, /version

`/v1/models` names what pools serve; `/ready` is 503 while a phase has no pool that is up. Beyond loopback a token
guards the control plane.
"""

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import json_response, life_routes, openai_errors
from kv_runtime.http.metrics import metrics_handler
from router.http import refusals
from router.http.exchange import Exchange
from router.pools.selection import PoolGroup
from router.pools.served import PoolAttempt, Pools
from router.pools.service import PoolService
from router.request.replies import Replies, answer, refusal_of, refuse
from router.request.request import Request


def pool_endpoints(service: PoolService) -> Replies:
    """Return the data plane's service."""

    def serve(exchange: Exchange) -> None:
        metrics, most = service.metrics, service.inflight_max
        if metrics.inflight >= most:
            message = f"queue.inflight_requests_max: {most} requests are being served; try again"
            refuse(exchange, refusals.unavailable(message, "overloaded"))
        else:
            metrics.began()
            pools = Pools(service)
            request = Request(exchange, pools, pools)
            request.run(request.live())

    def explain(exchange: Exchange) -> None:
        pools = Pools(service)
        request = Request(exchange, pools, pools)
        request.explain(_explain(request, pools))

    posts = {"/v1/chat/completions": serve, "/v1/completions": serve, "/v1/pools/select": explain}
    return Replies(posts, lambda: service.identity.models, service.readiness)


async def _explain(request: Request[PoolAttempt], pools: Pools) -> None:
    """Answer with the pools that the request would be sent to, and why."""
    try:
        await pools.read(request)
    except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
        refuse(request.exchange, refusal_of(error, request))
    else:
        answer(request.exchange, pools.selected())


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
    return [
        {
            "pool": index,
            "priority": group.priorities[index],
            **msgspec.structs.asdict(service.live.status(name)),
            **msgspec.structs.asdict(service.config.pools[name]),
        }
        for index, name in enumerate(group.namespaces)
    ]
