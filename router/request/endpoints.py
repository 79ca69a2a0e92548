"""The data plane's endpoints.

POST /v1/chat/completions, /v1/completions,   served: decided, forwarded, spliced (`served.py`)
     /v1/responses, /v1/embeddings
POST /v1/route                                the decision only: nothing is forwarded, no lease is taken
GET  /v1/models, /v1/models/{name}            the names that workers serve
POST, GET other paths that workers state      passed on (`passed.py`)
GET  /health, /live, /ready, /version         of this process; /ready is 503 with the reason while it is not to be used
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from kv_protocol.decided import RouteRequest
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.openai.endpoints import PATHS
from kv_protocol.openai.requests import RequestInvalid
from router.decision.errors import NoEligibleWorker
from router.decision.explain import explain
from router.decision.verdict import Verdict
from router.prompt import EncodedPrompt
from router.request import refusals
from router.request.passed import METHODS, PassedRequest, is_passed
from router.request.plan import RequestPlan
from router.request.reader import RequestReader
from router.request.refusals import Refusal, RequestRejected
from router.request.replies import MODELS_PATH, answer, answer_model, answer_models, refuse, unknown_path
from router.request.served import Served
from router.request.serving import Serving
from router.server.exchange import Exchange

if TYPE_CHECKING:
    import asyncio

Endpoint = Callable[[Exchange], None]
_PATHS: dict[str, str] = {str(name): path for name, path in PATHS.items()}


class Endpoints:
    """The data plane's service."""

    def __init__(self, serving: Serving, *, passed_paths: Sequence[str] = ()) -> None:
        """`passed_paths` are open besides, where a worker states them (`passed.py`)."""
        self._serving, self._passed_paths = serving, passed_paths
        self._endpoints: dict[str, tuple[str, Endpoint]] = {
            **dict.fromkeys(PATHS.values(), ("POST", self._serve)),
            "/v1/route": ("POST", self._decide_only),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/live": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/version": ("GET", self._version),
        }

    def __call__(self, exchange: Exchange) -> None:
        """Answer the exchange, now or later. On an exception the connection answers with a 500."""
        method, endpoint = self._endpoints.get(exchange.path) or self._of_a_name(exchange.path)
        if method not in ("", exchange.method) and (method, exchange.method) != ("GET", "HEAD"):
            refusal = refusals.invalid(f"method: found {exchange.method}, allowed {method}", status=405)
            self._serving.request_log.refused(refusal)
            exchange.answer(405, refusal.body, headers=((b"allow", method.encode()),))
        else:
            endpoint(exchange)

    # ------------------------------------------------------------------------------------------- endpoints

    def _serve(self, exchange: Exchange) -> None:
        refusal = self._serving.begin()
        if refusal is None:
            Served(exchange, self._serving).begin()
        else:
            refuse(exchange, refusal)

    def _decide_only(self, exchange: Exchange) -> None:
        DecisionOnly(exchange, self._serving).begin()

    def _of_a_name(self, path: str) -> tuple[str, Endpoint]:
        if path.startswith(MODELS_PATH):
            return "GET", self._model
        return "", self._passed if self._is_passed(path) else self._unknown_path

    def _is_passed(self, path: str) -> bool:
        workers = self._serving.routing.state.fleet.workers()
        return is_passed(path, self._passed_paths) and any(path in each.registration.api_endpoints for each in workers)

    def _passed(self, exchange: Exchange) -> None:
        if exchange.method not in METHODS:
            self._unknown_path(exchange)
        elif (refusal := self._serving.begin()) is None:
            PassedRequest(exchange, self._serving).begin()
        else:
            refuse(exchange, refusal)

    def _unknown_path(self, exchange: Exchange) -> None:
        refusal = unknown_path(exchange)
        self._serving.request_log.refused(refusal)
        refuse(exchange, refusal)

    def _models(self, exchange: Exchange) -> None:
        answer_models(exchange, self._serving.routing.state.fleet.models())

    def _model(self, exchange: Exchange) -> None:
        answer_model(exchange, self._serving.routing.state.fleet.models())

    def _health(self, exchange: Exchange) -> None:
        answer(exchange, {"status": "ok"})

    def _ready(self, exchange: Exchange) -> None:
        readiness = self._serving.routing.readiness()
        answer(exchange, readiness._asdict(), 200 if readiness.ready else 503)

    def _version(self, exchange: Exchange) -> None:
        answer(exchange, {"version": version("kv-router")})


class DecisionOnly(RequestReader):
    """`/v1/route`: the present decision and its reasons; with disaggregation, of both workers.

    `?endpoint=` names the endpoint that the body is for; without it, it is inferred from the body.
    """

    __slots__ = ("_serving",)

    def __init__(self, exchange: Exchange, serving: Serving) -> None:
        super().__init__(exchange, serving.bodies)
        self._serving = serving

    def begin(self) -> None:
        """Start reading the request."""
        self.exchange.on_gone(self.stop_reading)
        self.read()

    def _path(self) -> str:
        found = dict(parse_qsl(self.exchange.query)).get("endpoint", "")
        path = _PATHS.get(found)
        if found and path is None:
            raise RequestInvalid("endpoint", found, f"one of {', '.join(_PATHS)}")
        return path or self.exchange.path

    def _ask_prompt(self, read_s: float) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":
        self._serving.metrics.parsed(read_s)
        return self._serving.prompt_of(self.inbound, self.body)

    def _on_read(self, prompt: EncodedPrompt | None, prompt_s: float) -> None:
        serving = self._serving
        if prompt is not None:
            serving.metrics.tokenized(prompt_s)
        route = serving.route_request(self.inbound, self.exchange.headers, prompt)
        plan = serving.plan(route, self.inbound)
        serving.placed(route, plan, self.inbound)
        verdict = self._decided(route, plan)
        summary = _summary(verdict)
        if plan.is_aside:
            plan.prefilled()
            worker = serving.routing.state.fleet.worker(verdict.winner.worker_id)
            summary["decode"] = _summary(self._decided(route, plan, None if worker is None else worker.registration))
        answer(self.exchange, summary)

    def _decided(self, route: RouteRequest, plan: RequestPlan, prefill: WorkerRegistered | None = None) -> Verdict:
        serving = self._serving
        while True:
            phase_route = serving.route_of(route, plan, self.inbound, prefill)
            try:
                return serving.decide(phase_route)
            except NoEligibleWorker as error:
                if not plan.no_candidate():
                    serving.routing.refuse(phase_route, error.exclusions)
                    raise RequestRejected(serving.no_candidate(phase_route, error)) from error

    def _refuse(self, refusal: Refusal) -> None:
        self._serving.request_log.refused(refusal)
        refuse(self.exchange, refusal)


def _summary(verdict: Verdict) -> dict[str, object]:
    decision = verdict.decision()
    return {"decision": decision, "explanation": explain(decision, is_hypothetical=True)}
