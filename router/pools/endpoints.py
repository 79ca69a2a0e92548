"""The data plane's endpoints of `router pools`.

POST /v1/chat/completions, /v1/completions    served by pools (`served.py`)
POST /v1/pools/select                         which pools such a request would be for now, and why: nothing is forwarded
GET  /v1/models, /v1/models/{name}            the names that pools serve
GET  /health, /live, /ready, /version         of this process; /ready is 503 while a phase has no pool that is up
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from router.pools.reader import ask_prompt, selection_request
from router.pools.served import PoolServed
from router.pools.service import PoolService
from router.prompt import EncodedPrompt
from router.request import refusals
from router.request.reader import RequestReader
from router.request.refusals import Refusal
from router.request.replies import MODELS_PATH, answer, answer_model, answer_models, refuse, unknown_path
from router.server.exchange import Exchange

if TYPE_CHECKING:
    import asyncio

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
            PoolServed(exchange, self._service).begin()

    def _select(self, exchange: Exchange) -> None:
        SelectionOnly(exchange, self._service).begin()

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


class SelectionOnly(RequestReader):
    """`/v1/pools/select`: the pools that a request would be sent to, and why."""

    __slots__ = ("_service",)

    def __init__(self, exchange: Exchange, service: PoolService) -> None:
        super().__init__(exchange, service.bodies)
        self._service = service

    def begin(self) -> None:
        """Start reading the request."""
        self.exchange.on_gone(self.stop_reading)
        self.read()

    def _ask_prompt(self, read_s: float) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":  # noqa: ARG002
        return ask_prompt(self._service, self.inbound, self.body)

    def _on_read(self, prompt: EncodedPrompt | None, prompt_s: float) -> None:  # noqa: ARG002 - not counted
        service, inbound = self._service, self.inbound
        question = selection_request(service, inbound, self.exchange.headers, prompt)
        phases = service.plans(question.asked, one_token=inbound.limit_tokens == 1)
        answer(self.exchange, {"question": question, "phases": phases})

    def _refuse(self, refusal: Refusal) -> None:
        refuse(self.exchange, refusal)
