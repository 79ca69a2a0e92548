"""Engines behind servers of their own, for `worker-agent attach`: the doubles' HTTP, over an engine that computes.

    server         engine                                  answers                    events
    ------------   -------------------------------------   ------------------------   -----------------------------
    trtllm-serve   `TensorRTLLMEngine`, the fake package   our agent's, which speak   the engine's, polled
                                                           that server's handoffs
    vLLM           simulated                               our agent's                the engine's, in vLLM's frames,
                                                                                      encoded here

What the doubles refuse (`tests/system/integration/engine_doubles/`) is refused here, too. What only real servers know
stays unknown: the text of their errors, and how streams end when an engine dies.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import msgspec
import zmq.asyncio
from aiohttp import web

from kv_protocol.events import Tier
from kv_protocol.fleet import Role
from kv_protocol.hashing import to_i64
from kv_protocol.openai.requests import decode_chat, decode_completion
from kv_runtime.clock import Clock
from kv_runtime.text.loading import load_text
from tests.contract.engines import Worker as RoleEngine
from tests.system.integration.engine_doubles import Rank, TrtllmServeDouble, VllmDouble
from tests.system.integration.event_path import PlayedSource
from worker_agent.api.completions import Completions
from worker_agent.api.prompts import EnginePrompts
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.media.config import MediaSection
from worker_agent.media.loader import MediaLoader
from worker_agent.port.types import Engine, EngineError, EngineStopped

_POLL_S = 0.01
_MEDIA = {Tier.GPU: "GPU", Tier.HOST: "CPU"}


@asynccontextmanager
async def engine_running(engine: RoleEngine) -> AsyncIterator[None]:
    """Be where the engine runs; it may die meanwhile."""

    async def run() -> None:
        with suppress(EngineStopped):
            await engine.run()

    await engine.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(run())
        try:
            yield
        finally:
            await engine.stop(0.0)


def completions(engine: Engine, model: str, role: Role) -> Completions:
    """Return what answers for the engine."""
    text, ids = load_text("byte"), count(1)
    return Completions(
        engine,
        text,
        EnginePrompts(text, MediaLoader(MediaSection()), None),
        served_names=(model,),
        default_max_tokens=16,
        clock=Clock(),
        role=role,
        new_id=lambda: f"id{next(ids)}",
    )


async def answered(http: web.Request, answering: Completions) -> web.StreamResponse:
    decode = decode_chat if http.path.endswith("/chat/completions") else decode_completion
    return (await answering.answered(decode, http))[0]


class ComputingTrtllmServe(TrtllmServeDouble):
    """`trtllm-serve` over a running engine."""

    engine: RoleEngine
    answering: Completions

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        refusal = self.refusal(msgspec.json.decode(await request.read()))
        return refusal or await answered(request, self.answering)

    async def _kv_cache_events(self, request: web.Request) -> web.Response:
        try:
            self.events = await asyncio.to_thread(self.engine.kv_events, 0.0)
        except EngineError as error:
            return self.failed(500, str(error))
        return await super()._kv_cache_events(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.iterations += await asyncio.to_thread(self.engine.iteration_stats, 0.0)
        return await super()._metrics(request)


class ComputingVllm(VllmDouble):
    """vLLM's server over a running engine, which it tells the rank of a request."""

    engine: RoleEngine
    answering: Completions

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers.copy()
        if (rank := headers.pop("X-data-parallel-rank", None)) is not None:
            headers["x-dp-rank"] = rank
        request = request.clone(headers=headers)
        refusal = self.refusal(msgspec.json.decode(await request.read()))
        return refusal or await answered(request, self.answering)

    async def _metrics(self, request: web.Request) -> web.Response:
        for row in await asyncio.to_thread(self.engine.iteration_stats, 0.0):
            self.ranks[row.get("attentionDpRank") or 0] = Rank(
                row["numActiveRequests"], row["numQueuedRequests"], row["kvCacheStats"]["usedNumBlocks"]
            )
        return await super()._metrics(request)


@asynccontextmanager
async def publishing(engine: Engine, sources: Sequence[PlayedSource]) -> AsyncIterator[None]:
    """The engine's events are published as vLLM's, each rank's at its own publisher."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_publish(engine, sources))
        try:
            yield
        finally:
            task.cancel()


async def _publish(engine: Engine, sources: Sequence[PlayedSource]) -> None:
    rules = TrtllmRules(engine.describe().block_size)
    while True:
        for told in rules.translate(await asyncio.to_thread(engine.kv_events, _POLL_S)):
            with suppress(zmq.ZMQError):
                await sources[told.dp_rank].add(vllm_payload(told.event, told.dp_rank))


def vllm_payload(event: EngineEvent, dp_rank: int | None = 0) -> bytes:
    """Return a batch of one event as vLLM 0.24 encodes it. Source: `docs/SOURCES.md` E3.4, E3.7."""
    return msgspec.msgpack.encode([1.5, [vllm_event(event)], dp_rank])


def vllm_event(event: EngineEvent) -> dict[str, Any]:
    """Return the event as vLLM 0.24 tells it. Source: `docs/SOURCES.md` E3.4, E3.7."""
    if isinstance(event, EngineCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [to_i64(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, EngineRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIA[event.tier]}
    assert isinstance(event, EngineStored)
    parent = event.parent_block_hash
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if parent is None else to_i64(parent),
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _MEDIA[event.tier],
        "lora_name": None,
    }
