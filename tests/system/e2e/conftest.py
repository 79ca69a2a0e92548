"""Fleets of real processes for end-to-end tests: one a module, ports chosen by the system."""

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import Client

BLOCK_SIZE = 16
FAST_WORKER = (
    f"engine.block_size={BLOCK_SIZE}",
    "engine.speed=50",
    "telemetry.log_level=warning",
)
QUIET_ROUTER = ("telemetry.log_level=warning",)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[FleetProcesses]:
    """Two fast workers with small caches, and a router in mode kv."""
    settings = (*FAST_WORKER, "engine.total_kv_blocks=400", "engine.max_seq_len=4096")
    shape = FleetShape(
        workers=2, worker_settings=settings, router_settings=(*QUIET_ROUTER, "data.body_bytes_max=65536")
    )
    async with FleetProcesses(shape) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(fleet: FleetProcesses) -> AsyncIterator[Client]:
    """A client of that fleet."""
    async with aiohttp.ClientSession() as session:
        yield Client(session, fleet.data_url, fleet.control_url)
