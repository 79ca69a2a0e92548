"""Idle connections to the control plane take no file descriptors from the data plane."""

import asyncio
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import aiohttp

from bench.processes import FleetProcesses, FleetShape
from kv_runtime.http.connection_limit import CONTROL_CONNECTIONS_MAX
from tests.system.e2e.client import Client
from tests.system.e2e.conftest import FAST_WORKER
from tests.system.e2e.few_files import ALLOWED

IDLE = ALLOWED + 144
"""More than the router has descriptors."""
CHATS = 20


async def test_requests_are_served_while_more_clients_idle_at_the_control_plane_than_there_are_descriptors() -> None:
    shape = FleetShape(workers=1, worker_settings=FAST_WORKER, router_module="tests.system.e2e.few_files")
    async with AsyncExitStack() as cleanup:
        fleet = await cleanup.enter_async_context(FleetProcesses(shape))
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        client = Client(session, fleet.data_url, fleet.control_url)
        control = urlsplit(fleet.control_url)
        for _ in range(IDLE):
            _, writer = await asyncio.open_connection(control.hostname, control.port)
            cleanup.callback(writer.close)
        answers = await asyncio.gather(*(client.complete([number] * 40) for number in range(CHATS)))
        assert [each.status for each in answers] == [200] * CHATS
        async with session.get(f"{fleet.control_url}/metrics") as response:
            samples = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        assert float(samples["kvrouter_server_connections_max"]) == CONTROL_CONNECTIONS_MAX
        assert float(samples['kvrouter_server_connections_at_bound_total{outcome="idle_closed"}']) >= 1
        assert "connections_bound_reached" in fleet.router.output
