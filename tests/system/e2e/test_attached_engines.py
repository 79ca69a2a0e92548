"""Engines that run elsewhere, attached, behind a real router: it routes by their events and by their loads.

The engines are doubles of vLLM's server; events are frames as vLLM publishes them. Everything else is real processes.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from bench.processes import ChildProcess
from kv_runtime.clock import Clock
from tests.contract.engine_servers import vllm_payload
from tests.support.processes import running, running_router
from tests.system.e2e.client import Answered, Client
from tests.system.integration.engine_doubles import Rank, VllmDouble
from tests.system.integration.event_path import PlayedSource, playing, zmq_context
from worker_agent.events.engine_events import EngineStored

MODEL, BLOCK_SIZE = "llama", 16
CACHED = [token for block in range(1, 5) for token in [block] * BLOCK_SIZE]
PROMPT = [*CACHED, 5]
"""Four blocks that are cached and a token more: the last token of a prompt is always computed."""
WAIT_S = 60.0


@dataclass
class Attached:
    """One engine double, its publishers by rank, and the process that speaks for it."""

    engine: VllmDouble
    publishers: list[PlayedSource]
    process: ChildProcess

    async def store(self, tokens: list[int]) -> None:
        """Rank 0 stores these tokens' blocks."""
        names = tuple(1000 + number for number in range(len(tokens) // BLOCK_SIZE))
        event = EngineStored(block_hashes=names, parent_block_hash=None, token_ids=tuple(tokens), block_size=BLOCK_SIZE)
        await self.publishers[0].add(vllm_payload(event, 0))


@dataclass
class Cluster:
    """A router, and what is attached to it by worker id."""

    client: Client
    nats_url: str
    attached: dict[str, Attached]

    async def complete(self, prompt: list[int], **more: Any) -> Answered:
        return await self.client.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4, **more})

    async def until_routed(self, prompt: list[int], worker: str, overlap_blocks: int) -> None:
        """Return once the prompt would go to this worker, with so much of it found there."""
        routed: tuple[str, int] | None = None
        try:
            async with asyncio.timeout(WAIT_S):
                while (routed := await self._routed(prompt)) != (worker, overlap_blocks):
                    await Clock().sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"routed to {routed}, not to {worker} with {overlap_blocks} blocks") from None

    async def until_choosing_among(self, *workers: str) -> None:
        """Return once the router would choose among these workers."""
        found = set[str]()
        try:
            async with asyncio.timeout(WAIT_S):
                while found != set(workers):
                    await Clock().sleep(0.05)
                    decision = await self._decision([1, 2, 3])
                    found = set() if decision is None else {each["worker_id"] for each in decision["candidates"]}
        except TimeoutError:
            raise AssertionError(f"the router would choose among {found}") from None

    async def _routed(self, prompt: list[int]) -> tuple[str, int]:
        decision = await self._decision(prompt)
        if decision is None:
            return "", 0
        chosen = decision["candidates"][decision["winner"]]
        return chosen["worker_id"], int(chosen["overlap_blocks"][0])

    async def _decision(self, prompt: list[int]) -> dict[str, Any] | None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        async with self.client.session.post(f"{self.client.data_url}/v1/route", json=body) as response:
            return (await response.json())["decision"] if response.status == 200 else None


@asynccontextmanager
async def attaching(
    cluster: Cluster, worker: str, url: str, *arguments: str, kind: str = "vllm", ranks: int = 1
) -> AsyncIterator[tuple[list[PlayedSource], ChildProcess]]:
    """`worker-agent attach` runs for an engine that has a publisher a rank; yields the publishers and the process."""
    attach = (sys.executable, "-m", "worker_agent", "attach", "--worker-id", worker, "--nats-url", cluster.nats_url)
    quiet = ("--text", "byte", "--set", "telemetry.log_level=warning")
    async with zmq_context() as context, playing(context, ranks, topic=()) as publishers:
        engine = ("--engine", kind, "--url", url, *publishers[0].flags)
        async with running(ChildProcess(worker, [*attach, *quiet, *engine, *arguments])) as process:
            yield publishers, process


@asynccontextmanager
async def attached(cluster: Cluster, worker: str, ranks: int) -> AsyncIterator[Attached]:
    double = VllmDouble(model=MODEL, ranks=[Rank() for _ in range(ranks)])
    async with (
        double.serving() as engine,
        attaching(cluster, worker, engine.url, "--dp-ranks", str(ranks), ranks=ranks) as (publishers, process),
    ):
        yield Attached(engine, publishers, process)


@asynccontextmanager
async def running_cluster(*more_settings: str, **workers: int) -> AsyncIterator[Cluster]:
    """A router with these settings, and these workers with so many ranks each."""
    settings = ("nats.port=0", "telemetry.log_level=warning", *more_settings)
    assigned = [part for each in settings for part in ("--set", each)]
    async with (
        running_router(*assigned) as router,
        aiohttp.ClientSession() as session,
        AsyncExitStack() as cleanup,
    ):
        cluster = Cluster(Client(session, router.data_url, router.control_url), router.nats_url, {})
        for worker, ranks in workers.items():
            cluster.attached[worker] = await cleanup.enter_async_context(attached(cluster, worker, ranks))
        yield cluster


async def test_requests_go_where_attached_engines_hold_them_and_away_from_load() -> None:
    async with running_cluster(va=1, vb=1) as cluster:
        a, b = cluster.attached["va"], cluster.attached["vb"]
        await b.store(CACHED)
        await cluster.until_routed(PROMPT, "vb", 4)
        answered = await cluster.complete(PROMPT)
        assert (answered.status, answered.worker, answered.overlap_blocks) == (200, "vb", 4)
        ((path, headers, body),) = b.engine.requests
        assert (path, a.engine.requests) == ("/v1/completions", [])
        assert msgspec.json.decode(body) == {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
        assert "x-data-parallel-rank" not in headers
        fresh = [99] * (3 * BLOCK_SIZE)
        b.engine.ranks = [Rank(running=20, waiting=5)]
        await cluster.until_routed(fresh, "va", 0)
        a.engine.ranks, b.engine.ranks = [Rank(running=40)], [Rank()]
        await cluster.until_routed(fresh, "vb", 0)
        b.engine.is_healthy = False
        await cluster.until_routed(PROMPT, "va", 0)
        assert "Traceback" not in a.process.output + b.process.output
