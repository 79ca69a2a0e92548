"""The data plane's endpoints.

POST /v1/chat/completions, /v1/completions,   served: decided, forwarded, spliced (`request.py`)
     /v1/responses, /v1/embeddings
POST /v1/route                                the decision only: nothing is forwarded, no lease is taken
GET  /v1/models, /v1/models/{name}            the names that workers serve
POST, GET other paths that workers state      passed on (`passed.py`)
GET  /health, /live, /ready, /version         of this process; /ready is 503 with the reason while it is not to be used
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from urllib.parse import parse_qsl

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.openai.requests import RequestInvalid
from router.decision.explain import explain
from router.decision.verdict import Verdict
from router.request import refusals
from router.request.passed import METHODS, is_passed
from router.request.passed import MODE as PASSED
from router.request.replies import MODELS_PATH, answer, answer_model, answer_models, unknown_path
from router.request.request import Request, refusal_of
from router.request.serving import FleetRequest, Serving
from router.server.exchange import Exchange

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
        self._serving.serve(exchange)

    def _decide_only(self, exchange: Exchange) -> None:
        request = Request(exchange, self._serving)
        exchange.on_gone(request.stop)
        request.run(self._explain(request))

    async def _explain(self, request: FleetRequest) -> None:
        """Answer with the present decision and its reasons; with disaggregation, of both workers.

        `?endpoint=` names the endpoint that the body is for; without it, it is inferred from the body.
        """
        serving, exchange, decided = self._serving, request.exchange, list[Verdict]()
        try:
            exchange.path = _asked_path(exchange)
            await request.read()
            decided.append(request.decided(lambda each: serving.decide(each.route)))
            if request.plan.is_aside:
                request.plan.prefilled()
                request.prefilled_by = decided[0].winner
                serving.routed(request)
                decided.append(request.decided(lambda each: serving.decide(each.route)))
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            serving.refuse(exchange, refusal_of(error, request))
        else:
            answer(exchange, _summary(decided[0]) | ({"decode": _summary(decided[1])} if decided[1:] else {}))

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
        else:
            self._serving.serve(exchange, PASSED)

    def _unknown_path(self, exchange: Exchange) -> None:
        self._serving.refuse(exchange, unknown_path(exchange))

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


def _asked_path(exchange: Exchange) -> str:
    found = dict(parse_qsl(exchange.query)).get("endpoint", "")
    path = _PATHS.get(found)
    if found and path is None:
        raise RequestInvalid("endpoint", found, f"one of {', '.join(_PATHS)}")
    return path or exchange.path


def _summary(verdict: Verdict) -> dict[str, object]:
    decision = verdict.decision()
    return {"decision": decision, "explanation": explain(decision, is_hypothetical=True)}
