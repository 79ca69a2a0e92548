"""The agent's HTTP: OpenAI completions served by the engine, health, metrics, and a barrier for those who must know.

POST /v1/chat/completions, /v1/completions     GET /v1/models, /health, /live, /version, /metrics
GET  /v1/kv/position    each rank's (epoch, last_seq) after all that the engine had flushed before the call
GET  /status            whether the log is there, and where each rank's stream is
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_protocol import openai
from kv_protocol.openai import Request, RequestInvalid
from kv_runtime.chat_template import TextError
from kv_runtime.http import error_body, error_response, json_response, metrics_handler, openai_errors, require_token
from kv_runtime.text import Text
from worker_agent.core.answers import SSE_DONE, Answer, StopFilter, sse_error, usage
from worker_agent.core.engine import EngineRequest, EngineStopped, RequestRefused
from worker_agent.core.request_rules import engine_request
from worker_agent.engines.port import Engine
from worker_agent.prompts import Prompts

_BARRIER_S = 5.0
_RANK = re.compile("[0-9]{1,4}")
_FOUND_CHARACTERS_MAX = 16


class AgentApi:
    """The endpoints of one worker."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        prompts: Prompts,
        *,
        served_names: tuple[str, ...],
        default_max_tokens: int,
        inflight_requests_max: int,
        wall_ns: Callable[[], int],
        new_id: Callable[[], str],
        position: Callable[[], Awaitable[dict[int, tuple[int, int]]]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._engine, self._text, self._prompts = engine, text, prompts
        self._description = engine.describe()
        self._served_names = served_names
        self._default_max_tokens = default_max_tokens
        self._inflight_requests_max = inflight_requests_max
        self._wall_ns, self._new_id, self._position, self._status = wall_ns, new_id, position, status
        self.requests_total = {"ok": 0, "refused": 0, "failed": 0, "cancelled": 0}
        self.running = 0

    def app(self, registry: CollectorRegistry, *, token: str, body_bytes_max: int) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors, require_token(token)], client_max_size=body_bytes_max)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/kv/position", self._kv_position),
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/status", self._show_status),
                web.get("/version", self._version),
                web.get("/metrics", metrics_handler(registry)),
            ]
        )
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, openai.decode_chat)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, openai.decode_completion)

    async def _serve(self, http: web.Request, decode: Callable[[bytes], Request]) -> web.StreamResponse:
        if self.running >= self._inflight_requests_max:
            self.requests_total["refused"] += 1
            message = f"worker.inflight_requests_max: {self.running} requests are being served; try again"
            response = error_response(503, message, "server_error", code="overloaded")
            response.headers["Retry-After"] = "1"
            return response
        try:
            request = decode(await http.read())
            asked = await self._asked(http, request)
        except (RequestInvalid, TextError) as error:
            self.requests_total["refused"] += 1
            return error_response(400, str(error), "invalid_request_error", param=error.field)
        if request.model not in self._served_names:
            self.requests_total["refused"] += 1
            message = f"model: found {request.model!r}, allowed {', '.join(self._served_names)}"
            return error_response(404, message, "invalid_request_error", param="model", code="model_not_found")
        answer = Answer(request, asked.request_id, self._wall_ns() // 1_000_000_000)
        self.running += 1
        outcome = "failed"
        try:
            serve = self._stream if request.stream else self._whole
            answered, outcome = await serve(http, request, asked, answer)
        except RequestRefused as error:
            outcome = "refused"
            return error_response(400, str(error), "invalid_request_error", param=error.field)
        except EngineStopped as error:
            return error_response(503, str(error), "server_error", code="engine_stopped")
        except (asyncio.CancelledError, ConnectionError):  # the client went away
            outcome = "cancelled"
            raise
        else:
            return answered
        finally:
            self.running -= 1
            self.requests_total[outcome] += 1

    async def _asked(self, http: web.Request, request: Request) -> EngineRequest:
        rank = http.headers.get("x-dp-rank")
        if rank is not None and not _RANK.fullmatch(rank):
            raise RequestInvalid("x-dp-rank", rank[:_FOUND_CHARACTERS_MAX], "a decimal number")
        prompt = await self._prompts.prompt(request)
        return engine_request(
            request,
            prompt.tokens,
            self._description,
            media=prompt.media,
            request_id=self._new_id(),
            default_max_tokens=self._default_max_tokens,
            stop_token_ids=tuple(self._text.eos_ids),
            dp_rank=None if rank is None else int(rank),
        )

    async def _whole(
        self, _: web.Request, request: Request, asked: EngineRequest, answer: Answer
    ) -> tuple[web.StreamResponse, str]:
        generation = _Generation(self._engine, self._text, request.stops)
        shown = [text async for text in generation.run(asked)]
        body = answer.whole("".join(shown), generation.finish_reason, generation.usage(asked))
        return web.Response(body=body, content_type="application/json"), "ok"

    async def _stream(
        self, http: web.Request, request: Request, asked: EngineRequest, answer: Answer
    ) -> tuple[web.StreamResponse, str]:
        generation = _Generation(self._engine, self._text, request.stops)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        async with aclosing(generation.run(asked)) as texts:
            first = await anext(texts, "")
            await response.prepare(http)
            try:
                await response.write(answer.opening() + answer.delta(first))
                async for text in texts:
                    if text:
                        await response.write(answer.delta(text))
            except EngineStopped as error:
                ending, outcome = sse_error(error_body(str(error), "server_error", code="engine_stopped")), "failed"
            else:
                ending, outcome = answer.closing(generation.finish_reason), "ok"
                if request.include_usage:
                    ending += answer.usage_event(generation.usage(asked))
                ending += SSE_DONE
        await response.write(ending)
        await response.write_eof()
        return response, outcome

    async def _models(self, _: web.Request) -> web.Response:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "kv-router"} for name in self._served_names]
        return json_response({"object": "list", "data": models})

    async def _kv_position(self, _: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_BARRIER_S):
                position = await self._position()
        except TimeoutError:
            message = f"what the engine flushed was not read within {_BARRIER_S} s"
            return error_response(504, message, "server_error", code="not_reached")
        return json_response(
            {"ranks": [{"dp_rank": rank, "epoch": epoch, "seq": seq} for rank, (epoch, seq) in position.items()]}
        )

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok", "running_requests": self.running})

    async def _show_status(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok", "running_requests": self.running, **self._status()})

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"engine": self._description.event_source, "version": self._description.version})


class _Generation:
    """One generation as text: tokens decoded, cut at a stop string, counted."""

    def __init__(self, engine: Engine, text: Text, stops: tuple[str, ...]) -> None:
        self._engine = engine
        self._detokenizer = text.detokenizer()
        self._filter = StopFilter(stops)
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.finish_reason = "stop"

    async def run(self, asked: EngineRequest) -> AsyncGenerator[str, None]:
        """Yield text as it comes, also empty text, so that every engine output shows as life."""
        outputs = self._engine.generate(asked)
        try:
            async for output in outputs:
                self._cached_tokens = output.cached_tokens
                self._completion_tokens += len(output.token_ids)
                yield self._filter.push(self._detokenizer.push(output.token_ids))
                if self._filter.stopped:
                    return
                self.finish_reason = output.finish_reason or self.finish_reason
            yield self._filter.push(self._detokenizer.flush()) + self._filter.flush()
        finally:
            await outputs.aclose()

    def usage(self, asked: EngineRequest) -> dict[str, object]:
        """Return the usage so far."""
        return usage(len(asked.prompt), self._completion_tokens, self._cached_tokens)
