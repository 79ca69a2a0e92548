"""A journal over a real router and nats-server stays replayable, whatever prompts clients send."""

import asyncio
import io
import json
import re
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import Fleet, FleetShape
from tests.e2e.client import MODEL, Client
from tests.e2e.conftest import FAST_WORKER

LONG_BYTES = 2_500_000


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """One worker with short contexts and small blocks, and one router."""
    settings = (*FAST_WORKER, "engine.total_kv_blocks=400", "engine.max_seq_len=4096", "engine.block_size=8")
    async with Fleet(
        FleetShape(workers=1, worker_settings=settings, router_settings=("journal.router=r1",))
    ) as running:
        yield running


async def replayed(nats_url: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "replay", "--nats-url", nats_url),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode()


def figure(name: str, report: str) -> int:
    found = re.search(rf"^{name} +(\d+)", report, re.MULTILINE)
    assert found is not None, report
    return int(found[1])


@pytest.mark.asyncio
async def test_decisions_behind_a_refused_prompt_of_megabytes_are_replayed_bit_for_bit(fleet: Fleet) -> None:
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
