"""The embedded nats-server is killed: it is started again, and no stream ends."""

import asyncio

import psutil
import pytest

from bench.processes import FleetShape
from kv_runtime.clock import Clock
from tests.system.e2e.client import MODEL, fleet_of
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER

WAIT_S = 60.0


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_killed_nats_server_is_started_again_and_costs_no_stream(processes: int) -> None:
    router = (*QUIET_ROUTER, f"data.processes={processes}")
    shape = FleetShape(workers=1, worker_settings=(*FAST_WORKER, "engine.speed=2"), router_settings=router)
    async with fleet_of(shape) as (fleet, client):
        body = {"model": MODEL, "prompt": "a prompt", "max_tokens": 100, "stream": True}
        async with client.session.post(f"{fleet.data_url}/v1/completions", json=body) as response:
            answer = await response.content.readany()
            children = psutil.Process(fleet.router.pid).children(recursive=True)
            (server,) = [each for each in children if each.name() == "nats-server"]
            server.kill()
            answer += await response.content.read()
        assert answer.endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(WAIT_S):
            while (await client.scrape()).total("nats_server_restarts_total") != 1:
                await Clock().sleep(0.05)
        await fleet.until_ready()
