"""The data plane's endpoints of `router pools`.

POST /v1/chat/completions, /v1/completions    served by pools (`served.py`)
POST /v1/pools/select                         which pools such a request would be for now, and why: nothing is forwarded
GET  /v1/models, /v1/models/{name}            the names that pools serve
GET  /health, /live, /ready, /version         of this process; /ready is 503 while a phase has no pool that is up
"""

from collections.abc import Callable
from importlib.metadata import version

from router.pools.served import PoolAttempt, Pools
from router.pools.service import PoolService
from router.request import refusals
from router.request.replies import MODELS_PATH, answer, answer_model, answer_models, refuse, unknown_path
from router.request.request import Request, refusal_of
from router.server.exchange import Exchange

Endpoint = Callable[[Exchange], None]


class PoolEndpoints:
    """The data plane's service."""

    def __init__(self, service: PoolService) -> None:
        self._service = service
        self._endpoints: dict[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", self._serve),
            "/v1/completions": ("POST", self._serve),
            "/v1/pools/select": ("POST", self._select),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/live": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/version": ("GET", self._version),
        }

    def __call__(self, exchange: Exchange) -> None:
        """Answer the exchange, now or later."""
        path = exchange.path
        of_a_name = ("GET", self._model) if path.startswith(MODELS_PATH) else None
        method, endpoint = (
            self._endpoints.get(path) or of_a_name or ("", lambda exchange: refuse(exchange, unknown_path(exchange)))
        )
        if method not in ("", exchange.method) and (method, exchange.method) != ("GET", "HEAD"):
            refusal = refusals.invalid(f"method: found {exchange.method}, allowed {method}", status=405)
            exchange.answer(405, refusal.body, headers=((b"allow", method.encode()),))
        else:
            endpoint(exchange)

    def _serve(self, exchange: Exchange) -> None:
        metrics, most = self._service.metrics, self._service.inflight_max
        if metrics.inflight >= most:
            message = f"queue.inflight_requests_max: {most} requests are being served; try again"
            refuse(exchange, refusals.unavailable(message, "overloaded"))
        else:
            metrics.began()
            Request(exchange, Pools(self._service)).begin()

    def _select(self, exchange: Exchange) -> None:
        pools = Pools(self._service)
        request = Request(exchange, pools)
        exchange.on_gone(request.stop)
        request.run(_explain(request, pools))

    def _models(self, exchange: Exchange) -> None:
        answer_models(exchange, self._service.identity.models)

    def _model(self, exchange: Exchange) -> None:
        answer_model(exchange, self._service.identity.models)

    def _health(self, exchange: Exchange) -> None:
        answer(exchange, {"status": "ok"})

    def _ready(self, exchange: Exchange) -> None:
        readiness = self._service.readiness()
        answer(exchange, readiness._asdict(), 200 if readiness.ready else 503)

    def _version(self, exchange: Exchange) -> None:
        answer(exchange, {"version": version("kv-router")})


async def _explain(request: Request[PoolAttempt], pools: Pools) -> None:
    """Answer with the pools that the request would be sent to, and why."""
    try:
        await request.read()
    except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
        refuse(request.exchange, refusal_of(error, request))
    else:
        answer(request.exchange, pools.selected())
