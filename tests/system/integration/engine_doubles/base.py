"""What the doubles of all engines share: they serve the model `m`, and what a test sets in the fields below.

For a new engine write a subclass of `PrometheusDouble` in a file of its own here, where `DOUBLES` finds it:

    facts          what `EngineClient.query` has to find of a new double that has computed something
    cards          the models in `/v1/models`
    metrics_text   the metrics: of each of `ranks`, `running` and `waiting` requests, `used_blocks` of `total_blocks`
    routes         if the engine has other paths: those of the base class, and these

Tests of all engines then recognize it, read its facts and the load of two ranks, register it and forward requests to
it. An engine with metrics in another form is a subclass of `EngineDouble`, with tests of its own.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgspec
from aiohttp import web

from tests.system.integration.double_contexts import Contexts
from worker_agent.engines.servers.base import EngineFacts

CHUNKS = (b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n', b"data: [DONE]\n\n")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Fault:
    """What a path does instead of answering: another status or body, no answer, or one that is cut."""

    status: int = 200
    body: bytes | None = None
    hangs: bool = False
    cuts: bool = False


@dataclass
class Rank:
    """One rank's load."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0


@dataclass
class EngineDouble(ABC):
    """What all have. `asked` counts paths; `requests` are generations: path, headers by lower-case name, body.

    A prefill and a decode server are two doubles with the same `contexts`: what the first holds for the second.
    """

    facts: ClassVar[EngineFacts]
    states_version: ClassVar[bool] = False
    """Whether it answers `/version`."""
    model: str = "m"
    ranks: list[Rank] = field(default_factory=lambda: [Rank()])
    block_size: int = 16
    total_blocks: int = 1000
    max_model_len: int = 4096
    is_healthy: bool = True
    contexts: Contexts = field(default_factory=lambda: Contexts(enabled=False))
    faults: dict[str, Fault] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    holds_answers: bool = False
    """Whether an answer stops after its first bytes, until `released`."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    served_paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """It answers on `url` until the end of the block; nothing may have surprised it."""
        app = web.Application(middlewares=[self._strictly])
        app.add_routes(self.routes())
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.released.set()
            await runner.cleanup()
        assert self.surprises == []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health, allow_head=False),
            web.get("/v1/models", self._models, allow_head=False),
            web.get("/metrics", self._metrics, allow_head=False),
            web.get("/openapi.json", self._openapi, allow_head=False),
            *([web.get("/version", self._version, allow_head=False)] if self.states_version else []),
            *(web.post(path, self._generate) for path in self.served_paths),
        ]

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.json_response({"openapi": "3.1.0", "paths": {path: {"post": {}} for path in self.served_paths}})

    @web.middleware
    async def _strictly(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked[request.path] += 1
        if request.query_string:
            self.surprises.append(f"{request.path}?{request.query_string}")
        if (fault := self.faults.get(request.path)) is not None:
            return await self._fail(request, fault)
        try:
            return await handler(request)
        except web.HTTPException as error:
            self.surprises.append(f"{error.status} {request.method} {request.path}")
            raise

    async def _fail(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.hangs:
            await self.released.wait()
        body = b"[" if fault.body is None else fault.body
        if not fault.cuts:
            return web.Response(status=fault.status, body=body)
        response = web.StreamResponse(headers={"Content-Length": str(len(body) + 10)})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.facts.version})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.cards()})

    @abstractmethod
    def cards(self) -> list[dict[str, Any]]:
        """Return the models that `/v1/models` lists."""

    @abstractmethod
    async def _metrics(self, _: web.Request) -> web.Response:
        """Answer `/metrics`."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        named = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, named, data))
        body = msgspec.json.decode(data)
        if (answer := self.refusal(body) or self.phase_answer(request.path, body)) is not None:
            return answer
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "ab"}], "usage": await self.computed(body)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-engine": "double"})
        await response.prepare(request)
        try:
            for number, chunk in enumerate(CHUNKS):
                if number and self.holds_answers:
                    await self.released.wait()
                await response.write(chunk)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise
        return response

    def refusal(self, body: dict[str, Any]) -> web.Response | None:
        """Return the error for a body that is refused: here, one for a model that is not served."""
        if body.get("model") in {card["id"] for card in self.cards()}:
            return None
        return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)

    def phase_answer(self, path: str, body: dict[str, Any]) -> web.Response | None:
        """Return the answer of a prefill server, or an error; None where the generation goes on here."""
        del path, body
        return None

    async def computed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Compute the prompt, and return the usage."""
        del body
        return {"prompt_tokens": 1}

    def compute(self) -> None:  # noqa: B027 - most tell nothing of it
        """It computes something."""

    def failed(self, status: int, message: str) -> web.Response:
        return web.json_response({"error": {"message": message, "code": status}}, status=status)


class PrometheusDouble(EngineDouble):
    """An engine whose `/metrics` is Prometheus' text."""

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics_text(), content_type="text/plain")

    @abstractmethod
    def metrics_text(self) -> str:
        """Return what `/metrics` says."""
