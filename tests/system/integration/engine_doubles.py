"""HTTP doubles of engines that run elsewhere: what `worker-agent attach` speaks to, built from public sources.

They are strict: a path that the real server does not have is 404, another method 405, and both stand in `surprises`,
which a test finds empty at the end. What is read once is gone, as it is there. Sources and versions: `docs/ATTACH.md`.

A prefill and a decode server are two doubles with the same `contexts`: what the one holds for the other. Every engine
of `SERVERS` has its double in `DOUBLES`, with the facts that are to be found of it: tests of all engines go through it.
"""

import asyncio
import base64
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgspec
from aiohttp import web

from tests.system.integration.double_contexts import DISAGGREGATED_KEYS, FIRST_TOKEN, Contexts, first_answer, prompt_of
from worker_agent.engines.servers.base import EngineFacts

OPENAI_KEYS = frozenset({"model", "messages", "prompt", "max_tokens", "stream", "stream_options", "temperature", "n"})
CHUNKS = (b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n', b"data: [DONE]\n\n")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


ONE_RANK: dict[str, Any] = {"directory": "m", "dp_ranks": 1, "block_size": 16, "max_seq_len": 4096}
"""What vLLM and SGLang say of themselves besides."""


def facts_of(kind: str, version: str, **more: Any) -> EngineFacts:
    """Return the facts of an engine of 1,000 blocks that serves the model `m`."""
    served: dict[str, Any] = {"served_names": ("m",), "total_kv_blocks": 1000, "api_endpoints": ("chat", "completions")}
    return EngineFacts(kind=kind, version=version, **served, **more)


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
    """What all have. `asked` counts paths; `requests` are generations: path, headers by lower-case name, body."""

    facts: ClassVar[EngineFacts]
    """What is to be found of a new one that has computed something."""
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


class VllmDouble(PrometheusDouble):
    """vLLM's OpenAI server, 0.33. `adapters` are LoRA names."""

    facts: ClassVar = facts_of("vllm", "0.33.0", publish_endpoint="tcp://*:5557", **ONE_RANK)
    adapters: tuple[str, ...] = ()
    publishes_at: tuple[str, ...] = ()
    """The addresses that its ranks bound; empty: those of its default configuration."""

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/version", self._version, allow_head=False),
            web.get("/kv_event_sources", self._event_sources, allow_head=False),
        ]

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.0"})

    async def _event_sources(self, _: web.Request) -> web.Response:
        said = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": None, "topic": ""}
        bound = self.publishes_at or [f"tcp://*:{5557 + rank}" for rank in range(len(self.ranks))]
        return web.json_response({str(rank): said | {"endpoint": at} for rank, at in enumerate(bound)})

    def cards(self) -> list[dict[str, Any]]:
        base = {"object": "model", "created": 1, "owned_by": "vllm", "root": self.model, "permission": []}
        served = {**base, "id": self.model, "parent": None, "max_model_len": self.max_model_len}
        return [served, *({**base, "id": name, "parent": self.model, "max_model_len": None} for name in self.adapters)]

    def phase_answer(self, path: str, body: dict[str, Any]) -> web.Response | None:
        """The NIXL connector's words: `do_remote_decode` asks a prefill server, its answer is a decode server's."""
        params = body.get("kv_transfer_params") or {}
        if not self.contexts.enabled or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
            return None
        if params.get("do_remote_prefill"):
            (name,) = params["remote_block_ids"]
            if self.contexts.held.pop(name, None) != params["remote_engine_id"]:
                self.surprises.append(f"blocks {name} of {params['remote_engine_id']}")
            return None
        if body.get("stream") or body.get("max_tokens") != 1:
            self.surprises.append(f"a prefill with stream {body.get('stream')}, max_tokens {body.get('max_tokens')}")
        answer = first_answer(path, body, self.contexts)
        said = None if self.contexts.ends_at_once else self._blocks_said()
        return web.json_response(answer | {"kv_transfer_params": said})

    def _blocks_said(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [self.contexts.hold(None, self.url)],
            "remote_engine_id": self.url,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }

    def metrics_text(self) -> str:
        lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
        for rank, load in enumerate(self.ranks):
            labels = f'engine="{rank}",model_name="{self.model}"'
            lines += [
                f"vllm:num_requests_running{{{labels}}} {float(load.running)}",
                f"vllm:num_requests_waiting{{{labels}}} {float(load.waiting)}",
                f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 9.0',
                f"vllm:kv_cache_usage_perc{{{labels}}} {load.used_blocks / self.total_blocks}",
                f"vllm:cache_config_info{{{self._cache_config(rank)}}} 1.0",
            ]
        return "\n".join([*lines, ""])

    def _cache_config(self, rank: int) -> str:
        said = {
            "block_size": self.block_size,
            "engine": rank,
            "num_gpu_blocks": self.total_blocks,
            "cache_dtype": "auto",
        }
        return ",".join(f'{name}="{value}"' for name, value in said.items())


class SglangDouble(PrometheusDouble):
    """SGLang's HTTP server, started with `--enable-metrics`. An old one has `/get_server_info` alone."""

    facts: ClassVar = facts_of(
        "sglang", "0.5.9", publish_endpoint="none", max_num_seqs=48, max_num_batched_tokens=8192, **ONE_RANK
    )
    is_old: bool = False
    kv_events_config: str | None = None
    """`--kv-events-config` as it was given."""

    def routes(self) -> list[web.RouteDef]:
        paths = ["/get_server_info"] if self.is_old else ["/get_server_info", "/server_info"]
        return [*super().routes(), *(web.get(path, self._server_info, allow_head=False) for path in paths)]

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model,
                "page_size": self.block_size,
                "context_length": None,
                "max_running_requests": 48,
                "chunked_prefill_size": 8192,
                "max_prefill_tokens": 16384,
                "dp_size": len(self.ranks),
                "status": "ready",
                "max_total_num_tokens": self.total_blocks * self.block_size,
                "max_req_input_len": self.max_model_len - 6,
                "internal_states": [{} for _ in self.ranks],
                "version": "0.5.9",
                "tokenizer_path": self.model,
                "kv_events_config": self.kv_events_config,
            }
        )

    def cards(self) -> list[dict[str, Any]]:
        named = {"id": self.model, "object": "model", "created": 1, "owned_by": "sglang", "root": self.model}
        return [named | {"parent": None, "max_model_len": self.max_model_len}]

    def refusal(self, body: dict[str, Any]) -> web.Response | None:
        if "messages" in body and body.get("stream") and body.get("return_token_ids"):
            return self.failed(400, "return_token_ids is not supported for streaming")
        return super().refusal(body)

    def metrics_text(self) -> str:
        lines = ["# TYPE sglang:num_running_reqs gauge"]
        for rank, load in enumerate(self.ranks):
            for tp_rank in (0, 1):  # of one rank, telling the same
                labels = f'dp_rank="{rank}",engine_type="unified",model_name="{self.model}",tp_rank="{tp_rank}"'
                lines += [
                    f"sglang:num_running_reqs{{{labels}}} {float(load.running)}",
                    f"sglang:num_queue_reqs{{{labels}}} {float(load.waiting)}",
                    f"sglang:num_used_tokens{{{labels}}} {float(load.used_blocks * self.block_size)}",
                    f"sglang:max_total_num_tokens{{{labels}}} {float(self.total_blocks * self.block_size)}",
                    f"sglang:token_usage{{{labels}}} {load.used_blocks / self.total_blocks}",
                ]
        return "\n".join([*lines, ""])


@dataclass
class TrtllmServeDouble(EngineDouble):
    """`trtllm-serve`, which refuses unknown keys. Events and iterations, put there by a test, are answered once."""

    facts: ClassVar = facts_of("trtllm-serve", "1.2.0", block_size=32, max_num_seqs=64, max_num_batched_tokens=8192)
    block_size: int = 32
    events: list[dict[str, Any]] = field(default_factory=list)
    iterations: list[dict[str, Any]] = field(default_factory=list)

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/version", self._version, allow_head=False),
            web.post("/kv_cache_events", self._kv_cache_events),
        ]

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.0"})

    async def _metrics(self, _: web.Request) -> web.Response:
        rows, self.iterations = self.iterations, []
        return web.json_response(rows)

    async def _kv_cache_events(self, request: web.Request) -> web.Response:
        if await request.read():
            self.surprises.append("a body for /kv_cache_events")
        events, self.events = self.events, []
        return web.json_response(events)

    def cards(self) -> list[dict[str, Any]]:
        return [{"id": self.model, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}]

    def refusal(self, body: dict[str, Any]) -> web.Response | None:
        unknown = body.keys() - OPENAI_KEYS - {"disaggregated_params", "prompt_token_ids"}
        unknown |= (body.get("disaggregated_params") or {}).keys() - DISAGGREGATED_KEYS
        if unknown:
            return web.json_response({"error": f"{sorted(unknown)}: Extra inputs are not permitted"}, status=400)
        return super().refusal(body)

    def phase_answer(self, path: str, body: dict[str, Any]) -> web.Response | None:
        """One server does what `request_type` says; a context's answer is not streamed, and repeats the prompt."""
        params = body.get("disaggregated_params") or {}
        kind = params.get("request_type", "context_and_generation")
        if kind == "context_and_generation":
            return None
        if kind not in ("context_only", "generation_only"):
            return self.failed(400, f"unknown request_type {kind}")
        if not self.contexts.enabled:
            return self.failed(400, f"a {kind} request needs cache_transceiver_config.backend")
        if kind == "generation_only":
            return self._went_on(params)
        if body.get("stream"):
            self.surprises.append("a context that is streamed")
        said = {"request_type": "context_only", "disagg_request_id": params.get("disagg_request_id")}
        if not self.contexts.ends_at_once:
            state = base64.b64encode(f"{self.url} {prompt_of(body)}".encode()).decode()
            name = self.contexts.hold(params.get("disagg_request_id"), state)
            said |= {"first_gen_tokens": [FIRST_TOKEN], "ctx_request_id": name, "encoded_opaque_state": state}
        answer = first_answer(path, body, self.contexts, disaggregated_params=said)
        return web.json_response(answer | {"prompt_token_ids": prompt_of(body)})

    def _went_on(self, params: dict[str, Any]) -> web.Response | None:
        if not params.get("first_gen_tokens"):
            return self.failed(400, "a generation_only request needs first_gen_tokens")
        name, state = params.get("ctx_request_id"), params.get("encoded_opaque_state")
        if name is None or state is None or self.contexts.held.pop(name, None) != state:
            return self.failed(500, "the context is not held")
        return None

    def compute(self) -> None:
        self.iterate()

    def iterate(self, *, number: int = 1) -> None:
        """One more iteration of rank 0 was computed. Source: `docs/SOURCES.md` E1.7."""
        load = self.ranks[0]
        self.iterations.append(
            {
                "iter": number,
                "iterLatencyMS": 12.5,
                "numActiveRequests": load.running,
                "numQueuedRequests": load.waiting,
                "maxBatchSizeStatic": 64,
                "maxNumTokensStatic": 8192,
                "kvCacheStats": {
                    "maxNumBlocks": self.total_blocks,
                    "usedNumBlocks": load.used_blocks,
                    "tokensPerBlock": self.block_size,
                },
                "inflightBatchingStats": {"numCtxTokens": 7},
                "attentionDpRank": 0,
            }
        )

    def store(self, event_id: int, blocks: Iterable[int], parent: int | None = None, dp_rank: int = 0) -> None:
        """Block n is full of the token n. Source of the shape: `docs/SOURCES.md` E1.3."""
        told = [
            {
                "type": "stored_block",
                "block_hash": block,
                "tokens": [{"type": "unique_token", "token_id": block, "token_extra_id": 0}] * self.block_size,
                "cache_level": 0,
                "priority": 35,
            }
            for block in blocks
        ]
        data = {"type": "stored", "parent_hash": parent, "blocks": told}
        self.events.append({"event_id": event_id, "data": data, "window_size": 4096, "attention_dp_rank": dp_rank})

    def create(self, event_id: int = 0, dp_rank: int = 0) -> None:
        """The first event of every life."""
        data = {"type": "created", "num_blocks_per_cache_level": [self.total_blocks, 0]}
        self.events.append({"event_id": event_id, "data": data, "window_size": 4096, "attention_dp_rank": dp_rank})


DOUBLES: dict[str, type[EngineDouble]] = {
    double.facts.kind: double for double in (VllmDouble, SglangDouble, TrtllmServeDouble)
}
"""By the engine's name in `SERVERS`."""
