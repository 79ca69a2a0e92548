"""The data plane's endpoints, beside those of every process (`replies.py`).

POST /v1/chat/completions, /v1/completions,   served: decided, forwarded, relayed (`request.py`)
     /v1/responses, /v1/embeddings
POST /v1/route                                the decision only: nothing is forwarded, no lease is taken
POST, GET other paths that workers state      passed on as they are to a worker that states the path, if
                                              `data.passed_paths` has it; placed by load, `/v1/messages` by its text.
                                              Limits, retries before the first byte and metrics are those of all
                                              requests; the mode in metrics is `other`
"""

from collections.abc import Sequence
from urllib.parse import parse_qsl

from kv_protocol.openai.endpoints import CLOSED_PATHS, PATHS
from kv_protocol.openai.requests import RequestInvalid
from router.decision.eligibility import NoEligibleWorker
from router.decision.report import explanation
from router.decision.verdict import Verdict
from router.http.exchange import Exchange
from router.request.reading import MODE_OF_PASSED
from router.request.replies import Endpoint, Replies, answer, refusal_of
from router.request.request import Request
from router.request.serving import FleetRequest, Serving

_METHODS = ("GET", "POST")
_PATHS: dict[str, str] = {str(name): path for name, path in PATHS.items()}


def endpoints(serving: Serving, *, passed_paths: Sequence[str] = ()) -> Replies:
    """Return the data plane's service; `passed_paths` are open, too, if a worker states them."""
    routing = serving.routing

    def explains(exchange: Exchange) -> None:
        request = Request(exchange, serving)
        exchange.when_gone = lambda _: request.stop()
        request.run(_explain(request, serving))

    def passes(exchange: Exchange) -> bool:
        path, workers = exchange.path, routing.state.fleet.workers()
        if exchange.method not in _METHODS or not is_passed(path, passed_paths):
            return False
        if not any(path in each.registration.api_endpoints for each in workers):
            return False
        serving.serve(exchange, MODE_OF_PASSED)
        return True

    posts: dict[str, Endpoint] = {**dict.fromkeys(PATHS.values(), serving.serve), "/v1/route": explains}
    return Replies(posts, routing.state.fleet.models, routing.readiness, serving.refuse, passes)


def is_passed(path: str, allowed: Sequence[str]) -> bool:
    """Return whether requests to the path are passed on: it is in `allowed`, or below one that ends with a slash."""
    if path in allowed:
        return True
    return path not in CLOSED_PATHS and any(each.endswith("/") and path.startswith(each) for each in allowed)


async def _explain(request: FleetRequest, serving: Serving) -> None:
    """Answer with the decision that would be made now, and its reasons; with disaggregation, with both decisions.

    `?endpoint=` names the endpoint that the body is for; without it, it is inferred from the body.
    """
    exchange, decided = request.exchange, list[Verdict]()
    try:
        exchange.path = _asked_path(exchange)
        await serving.read(request)
        decided.append(_decided(request, serving))
        if request.plan.is_aside:
            request.plan = request.plan.to("decode")
            request.prefilled_by = decided[0].winner
            serving.routed(request)
            decided.append(_decided(request, serving))
    except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
        serving.refuse(exchange, refusal_of(error, request))
    else:
        answer(exchange, _summary(decided[0]) | ({"decode": _summary(decided[1])} if decided[1:] else {}))


def _decided(request: FleetRequest, serving: Serving) -> Verdict:
    while True:
        try:
            return serving.decide(request)
        except NoEligibleWorker as error:
            if not request.enters_other_phase(error):
                raise


def _asked_path(exchange: Exchange) -> str:
    found = dict(parse_qsl(exchange.query)).get("endpoint", "")
    path = _PATHS.get(found)
    if found and path is None:
        raise RequestInvalid("endpoint", found, f"one of {', '.join(_PATHS)}")
    return path or exchange.path


def _summary(verdict: Verdict) -> dict[str, object]:
    decision = verdict.decision()
    return {"decision": decision, "explanation": explanation(decision, is_hypothetical=True)}
