"""TensorRT-LLM's server. Source: `worker_agent/engines/servers/trtllm_serve.py`."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web

from tests.system.integration.double_contexts import DISAGGREGATED_KEYS, FIRST_TOKEN, first_answer, prompt_of
from tests.system.integration.engine_doubles.base import EngineDouble
from worker_agent.engines.servers.base import EngineFacts

OPENAI_KEYS = frozenset({"model", "messages", "prompt", "max_tokens", "stream", "stream_options", "temperature", "n"})


@dataclass
class TrtllmServeDouble(EngineDouble):
    """`trtllm-serve`, which refuses unknown keys. Events and iterations, put there by a test, are answered once."""

    facts: ClassVar = EngineFacts(
        kind="trtllm-serve",
        version="1.2.0",
        served_names=("m",),
        api_endpoints=("chat", "completions"),
        block_size=32,
        total_kv_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
    )
    states_version: ClassVar = True
    block_size: int = 32
    events: list[dict[str, Any]] = field(default_factory=list)
    iterations: list[dict[str, Any]] = field(default_factory=list)

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/kv_cache_events", self._kv_cache_events)]

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
