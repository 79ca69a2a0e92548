"""The data plane: OpenAI requests in, the chosen worker's answer out, byte for byte.

    read -> check -> tokens -> decide -> promise -> forward -> splice -> settle

A worker that fails before its first byte, or is busy (429, 503), is left alone and another is tried, at most
`retry_limit` times; one that fails later ends the answer with an error event. A client that leaves frees all at once.
"""

import asyncio
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import msgspec
import structlog
from aiohttp import web

from kv_protocol import openai
from kv_protocol.decision import Decision
from kv_protocol.errors import UNDECODABLE
from kv_protocol.hashing import Hashing
from kv_protocol.ids import DP_RANK_MAX, WorkerRank
from kv_protocol.openai import Request, RequestInvalid
from kv_runtime.chat_template import TextError
from kv_runtime.http import error_body, error_response, json_response, openai_errors
from kv_runtime.text import Text
from router.config import RouterSettings
from router.core.errors import NoEligibleWorker
from router.core.explain import explain
from router.core.view import RouteRequest
from router.forward import Answer, Forwarder, ForwardRequest, UpstreamFailed
from router.metrics import RequestMetrics
from router.routing import Lease, OutcomeName, Routing
from router.tokens import Prompt, prompt_of, with_prompt_ids
from router.usage import UsageReader, WholeEvents

_REQUEST_ID_CHARACTERS_MAX = 128
_STREAM = "text/event-stream"
_REDIRECTS = range(300, 400)
_SERVER_ERROR = 500
_BUSY = frozenset({429, 503})
_BUSY_S = 1.0
_SECONDS = re.compile(r"[0-9]{1,6}")
_DP_RANK = re.compile(r"[0-9]{1,4}")
_CLIENT_LEFT = (asyncio.CancelledError, ConnectionError)
"""Errors of the worker's connection are `UpstreamFailed`: one that is not is the client's."""

_log = structlog.get_logger("router")


class Refused(Exception):
    """The request ends here, with this response."""

    def __init__(self, response: web.Response, outcome: str = "refused") -> None:
        super().__init__(response.status)
        self.response = response
        self.outcome = outcome


class _Inbound(NamedTuple):
    """A checked request on its way: the client's bytes, what they say, and the prompt in them."""

    path: str
    body: bytes
    request: Request
    prompt: Prompt
    route: RouteRequest


class DataPlane:
    """The endpoints that clients talk to; `index_name` says to them which index serves."""

    def __init__(
        self,
        routing: Routing,
        forwarder: Forwarder,
        text: Text,
        metrics: RequestMetrics,
        settings: RouterSettings,
        new_id: Callable[[], str],
        *,
        index_name: str,
    ) -> None:
        self._routing, self._forwarder, self._text = routing, forwarder, text
        self._metrics, self._settings, self._new_id = metrics, settings, new_id
        self._index_name = index_name
        self._inflight = 0

    def app(self) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors], client_max_size=self._settings.data.body_bytes_max)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._serve),
                web.post("/v1/completions", self._serve),
                web.post("/v1/route", self._route),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/ready", self._ready),
                web.get("/version", self._version),
            ]
        )
        return app

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        if self._inflight >= self._settings.queue.inflight_requests_max:
            self._metrics.rejected("inflight_requests_max")
            message = f"queue.inflight_requests_max: {self._inflight} requests are being served; try again"
            return _unavailable(message, "overloaded")
        self._inflight += 1
        watch = self._metrics.begin()
        model, outcome = "", "failed"
        try:
            inbound = await self._inbound(http)
            model = inbound.route.model
            response, outcome = await self._attempts(http, inbound)
        except Refused as refused:
            outcome = refused.outcome
            return refused.response
        except web.HTTPException:
            outcome = "refused"
            raise
        except _CLIENT_LEFT:
            outcome = "cancelled"
            raise
        else:
            return response
        finally:
            self._inflight -= 1
            self._metrics.end(watch, model, self._routing.policy.mode, outcome)

    async def _inbound(self, http: web.Request) -> _Inbound:
        try:
            body = await _body(http)
            path = _path_of(body) if http.path == "/v1/route" else http.path
            decode = openai.decode_chat if path == "/v1/chat/completions" else openai.decode_completion
            request = decode(body)
            prompt = prompt_of(request, self._text, self._hashing(request.model))
            return _Inbound(path, body, request, prompt, self._route_request(http, request, prompt))
        except (RequestInvalid, TextError) as error:
            raise Refused(error_response(400, str(error), "invalid_request_error", param=error.field)) from error

    def _hashing(self, model: str) -> Hashing:
        hashing = self._routing.state.fleet.hashing(model, self._routing.clock.now())
        if hashing is not None:
            return hashing
        models = self._routing.state.fleet.models()
        if not models:
            raise Refused(_unavailable("no worker is registered yet", "no_worker"), "failed")
        message = f"model: found {model!r}, allowed {', '.join(models)}"
        raise Refused(error_response(404, message, "invalid_request_error", param="model", code="model_not_found"))

    def _route_request(self, http: web.Request, request: Request, prompt: Prompt) -> RouteRequest:
        dp_rank = http.headers.get("x-dp-rank")
        if dp_rank is not None and not _DP_RANK.fullmatch(dp_rank):
            raise RequestInvalid("x-dp-rank", dp_rank, f"0..{DP_RANK_MAX}")
        request_id = http.headers.get("x-request-id", "")
        if not request_id.isprintable() or not 0 < len(request_id) <= _REQUEST_ID_CHARACTERS_MAX:
            request_id = self._new_id()
        return RouteRequest(
            decision_id=self._new_id(),
            request_id=request_id,
            model=request.model,
            isl_tokens=len(prompt.ids),
            block_size=prompt.hashing.block_size,
            hash_scheme=prompt.hashing.scheme,
            sequence_hashes=prompt.sequence_hashes,
            max_tokens=request.limit_tokens or 0,
            pinned_worker=http.headers.get("x-worker-instance-id"),
            pinned_dp_rank=None if dp_rank is None else int(dp_rank),
        )

    def _decided(self, route: RouteRequest) -> Decision:
        try:
            with self._metrics.decision_timer():
                return self._routing.decide(route)
        except NoEligibleWorker as error:
            if error.exclusions and all(each.reason.startswith("max_seq_len") for each in error.exclusions):
                refusal = error_response(400, str(error), "invalid_request_error", code="context_length_exceeded")
                raise Refused(refusal) from error
            raise Refused(_unavailable(str(error), "no_eligible_worker"), "failed") from error

    async def _attempts(self, http: web.Request, inbound: _Inbound) -> tuple[web.StreamResponse, OutcomeName]:
        route, failed = inbound.route, ""
        while True:
            decision = self._decided(route)
            if failed:
                self._metrics.retried(failed)
            lease = self._routing.take(route, decision)
            self._metrics.decided(decision)
            try:
                return await self._attempt(http, inbound, decision, lease)
            except UpstreamFailed as error:
                lease.end("failed")
                chosen = WorkerRank(decision.chosen.worker_id, decision.chosen.dp_rank)
                self._failed(chosen, error)
                if len(route.tried) >= self._settings.failures.retry_limit:
                    raise Refused(_given_up(chosen, error), "failed") from error
                failed = error.phase
                route = msgspec.structs.replace(route, tried=(*route.tried, chosen), decision_id=self._new_id())
            except _CLIENT_LEFT:
                lease.end("cancelled")
                raise
            except BaseException:
                lease.end("failed")
                raise

    def _failed(self, rank: WorkerRank, error: UpstreamFailed) -> None:
        if error.busy_s is None:
            _log.warning("worker_failed", worker=rank.worker_id, phase=error.phase, reason=error.reason)
            self._metrics.worker_failed(rank.worker_id, error.phase)
        open_s = self._settings.failures.breaker_open_s
        self._routing.open_breaker(rank.worker_id, str(error), open_s if error.busy_s is None else error.busy_s)

    async def _attempt(
        self, http: web.Request, inbound: _Inbound, decision: Decision, lease: Lease
    ) -> tuple[web.StreamResponse, OutcomeName]:
        chosen = decision.chosen
        worker = self._routing.state.fleet.worker(chosen.worker_id)
        if worker is None:
            raise UpstreamFailed("connect", "the worker left")
        accepts_ids = worker.registration.accepts_token_ids
        body = with_prompt_ids(inbound.body, inbound.prompt.ids) if accepts_ids else inbound.body
        headers = {"Content-Type": "application/json", "x-request-id": decision.request_id}
        if accepts_ids:
            headers["x-dp-rank"] = str(chosen.dp_rank)
        outgoing = ForwardRequest(inbound.path, headers, body)
        async with self._forwarder.forward(outgoing, worker.registration.base_url) as answer:
            if answer.status in _BUSY:
                raise UpstreamFailed("first_byte", f"status {answer.status}", self._busy_s(answer))
            if answer.status >= _SERVER_ERROR or answer.status in _REDIRECTS:
                raise UpstreamFailed("first_byte", f"status {answer.status}")
            spliced = _Spliced(answer, decision, lease, _headers(inbound.request, decision))
            response = await (spliced.stream(http) if answer.content_type == _STREAM else spliced.whole())
        self._settle(decision, lease, spliced)
        return response, spliced.outcome

    def _busy_s(self, answer: Answer) -> float:
        wanted_s = float(answer.retry_after) if _SECONDS.fullmatch(answer.retry_after) else _BUSY_S
        return min(wanted_s, self._settings.failures.breaker_open_s)

    def _settle(self, decision: Decision, lease: Lease, spliced: "_Spliced") -> None:
        cached_tokens = spliced.cached_tokens
        lease.end(spliced.outcome, cached_tokens)
        self._metrics.settled(decision, cached_tokens, lease.ttft_s)
        if spliced.failure is not None:
            self._failed(WorkerRank(decision.chosen.worker_id, decision.chosen.dp_rank), spliced.failure)

    async def _route(self, http: web.Request) -> web.Response:
        try:
            inbound = await self._inbound(http)
            decision = self._decided(inbound.route)
        except Refused as refused:
            return refused.response
        return json_response({"decision": decision, "explanation": explain(decision)})

    async def _models(self, _: web.Request) -> web.Response:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "kv-router"}
            for name in self._routing.state.fleet.models()
        ]
        return json_response({"object": "list", "data": models})

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        readiness = self._routing.readiness()
        return json_response(readiness, status=200 if readiness.ready else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": version("kv-router"), "index": self._index_name})


class _Spliced:
    """A worker's answer on its way to the client, and how it ended: `outcome`, `cached_tokens`, `failure`."""

    def __init__(self, answer: Answer, decision: Decision, lease: Lease, headers: dict[str, str]) -> None:
        self._answer, self._decision, self._lease, self._headers = answer, decision, lease, headers
        self._usage = UsageReader()
        self.outcome: OutcomeName = "ok" if answer.status < 400 else "refused"  # noqa: PLR2004 - the first of the refusals
        self.failure: UpstreamFailed | None = None

    @property
    def cached_tokens(self) -> int | None:
        """What the worker says it reused of the prompt, if it said so."""
        return self._usage.cached_tokens

    async def whole(self) -> web.Response:
        """Return the answer in one piece; raise `UpstreamFailed` where it is cut off: the client has seen nothing."""
        parts = []
        async for chunk in self._answer.chunks:
            self._lease.on_bytes()
            parts.append(chunk)
        body = b"".join(parts)
        self._usage.feed(body)
        return web.Response(
            status=self._answer.status, body=body, content_type=self._answer.content_type, headers=self._headers
        )

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """Return the stream, once it is over; cut off after its first byte, it ends with an error event.

        Raises:
            UpstreamFailed: it has no first byte; the client has seen nothing.
        """
        chunks = self._answer.chunks
        first = await anext(chunks, b"")
        if not first and self.outcome == "ok":
            raise UpstreamFailed("first_byte", "no bytes")
        self._lease.on_bytes()
        response = web.StreamResponse(
            status=self._answer.status, headers={**self._headers, "Content-Type": _STREAM, "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        events = WholeEvents()
        try:
            self._usage.feed(first)
            await response.write(events.push(first))
            async for chunk in chunks:
                self._lease.on_bytes()
                self._usage.feed(chunk)
                await response.write(events.push(chunk))
            await response.write(events.flush())
        except UpstreamFailed as error:
            self.outcome, self.failure = "failed", error
            message = f"worker {self._decision.chosen.worker_id} failed in its answer: {error}"
            body = error_body(message, "server_error", code="upstream_failed")
            await response.write(b"\n\ndata: " + body + b"\n\ndata: [DONE]\n\n")  # the cut may be within an event
        await response.write_eof()
        return response


def _given_up(rank: WorkerRank, error: UpstreamFailed) -> web.Response:
    if error.busy_s is not None:
        return _unavailable(f"worker {rank} is busy, and so were the others: {error}", "overloaded")
    return error_response(502, f"worker {rank} failed: {error}", "server_error", code="upstream_failed")


async def _body(http: web.Request) -> bytes:
    try:
        return await http.read()
    except web.RequestPayloadError as error:
        encoding = http.headers.get("Content-Encoding", "identity")
        raise RequestInvalid(
            "body", "bytes that cannot be read", f"what its headers say, encoding {encoding}"
        ) from error


def _path_of(body: bytes) -> str:
    """Return where a body belongs: a chat has messages. Where it cannot be read, either will say so."""
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNDECODABLE:
        keys = {}
    return "/v1/chat/completions" if "messages" in keys else "/v1/completions"


def _unavailable(message: str, code: str) -> web.Response:
    response = error_response(503, message, "server_error", code=code)
    response.headers["Retry-After"] = "1"
    return response


def _headers(request: Request, decision: Decision) -> dict[str, str]:
    chosen = decision.chosen
    headers = {
        "x-request-id": decision.request_id,
        "x-decision-id": decision.decision_id,
        "x-worker-instance-id": chosen.worker_id,
        "x-dp-rank": str(chosen.dp_rank),
        "x-overlap-blocks": str(chosen.overlap_blocks[0]),
    }
    if ignored := openai.ineffective_keys(request):
        headers["x-ignored-parameters"] = ", ".join(ignored)
    return headers
