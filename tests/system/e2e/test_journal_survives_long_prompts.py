"""A journal over a real router and nats-server stays replayable, whatever prompts clients send."""

import io
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import FAST_WORKER
from tests.system.e2e.replays import figure, replayed

LONG_BYTES = 2_500_000


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[FleetProcesses]:
    """One worker with short contexts and small blocks, and one router."""
    settings = (*FAST_WORKER, "engine.total_kv_blocks=400", "engine.max_seq_len=4096", "engine.block_size=8")
    async with FleetProcesses(
        FleetShape(workers=1, worker_settings=settings, router_settings=("journal.router=r1",))
    ) as running:
        yield running


async def test_decisions_behind_a_refused_prompt_of_megabytes_are_replayed_bit_for_bit(fleet: FleetProcesses) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, fleet.data_url, fleet.control_url)
        assert (await client.complete([1, 2, 3])).status == 200
        body = io.BytesIO(json.dumps({"model": MODEL, "prompt": "x" * LONG_BYTES, "max_tokens": 8}).encode())
        async with session.post(f"{fleet.data_url}/v1/completions", data=body) as refused:
            assert refused.status == 400
            assert "max_seq_len" in await refused.text()
        for at in range(5):
            assert (await client.complete([1, 2, 3, at])).status == 200
        report = await replayed(fleet.nats_url)
        while figure("equal", report) < 7:
            report = await replayed(fleet.nats_url)
            assert figure("not exact", report) == 0, report
    assert (figure("equal", report), figure("different", report), figure("not exact", report)) == (7, 0, 0)
