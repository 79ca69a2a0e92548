"""A host tier that tells of itself: two sources, one rank, and the index knows what the worker can reuse."""

import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import BLOCK_SIZE, FAST_WORKER, QUIET_ROUTER

GPU_BLOCKS, HOST_BLOCKS = 60, 120
SEED = 4


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[Client]:
    """A client of a fleet of one worker with a small GPU pool and a larger host pool."""
    settings = (
        *FAST_WORKER,
        f"engine.total_kv_blocks={GPU_BLOCKS}",
        f"engine.host_blocks={HOST_BLOCKS}",
        "engine.host_events=source",
        "engine.max_seq_len=1024",
    )
    shape = FleetShape(workers=1, worker_settings=settings, router_settings=QUIET_ROUTER)
    async with FleetProcesses(shape) as running, aiohttp.ClientSession() as session:
        yield Client(session, running.data_url, running.control_url)


async def metric(client: Client, name: str, *labels: str) -> float:
    async with client.session.get(f"{await client.base_url('w0')}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def predicted_blocks(client: Client, prompt: list[int]) -> list[int]:
    """Return how many blocks of the prompt the index finds on the GPU, and on GPU and host together."""
    answered = await client.post("/v1/route", {"model": MODEL, "prompt": prompt, "max_tokens": 4})
    gpu, with_host, *_ = answered.body["decision"]["candidates"][0]["overlap_blocks"]
    return [gpu, with_host]


@pytest.mark.asyncio(loop_scope="module")
async def test_blocks_of_both_tiers_are_known_block_for_block(client: Client) -> None:
    draw = random.Random(SEED)
    prompts = [[draw.randrange(256) for _ in range(20 * BLOCK_SIZE)] for _ in range(12)]
    wrong, from_host = [], 0
    for number in range(60):
        prompt = draw.choice(prompts)
        gpu, with_host = await predicted_blocks(client, prompt)
        answered = await client.complete(prompt, max_tokens=4)
        await client.until_index_has("w0")
        reused = answered.cached_tokens // BLOCK_SIZE
        from_host += reused > gpu
        if reused != min(with_host, len(prompt) // BLOCK_SIZE - 1):  # an engine computes the last token again
            wrong.append((number, gpu, with_host, reused))
    changed = "kvrouter_mirror_blocks_changed_total"
    assert wrong == [], f"seed {SEED}"
    assert from_host > 10, f"seed {SEED}: too few to prove anything"
    assert await metric(client, changed, 'source="host"', 'kind="removed"') > 0
    assert await metric(client, changed, 'kind="unknown_parent"') == 0
    assert await metric(client, "kvrouter_mirror_blocks") > GPU_BLOCKS
