"""The control plane of a router in several processes, of which none answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kv_runtime.http.server import HttpServer
from router.admin.control_plane import ControlPlane
from router.processes.front import Front
from router.processes.links import Links
from tests.unit.router.plane import running_plane


@asynccontextmanager
async def front_alone(directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Run it; yield a session to its address. `directory` has what it keeps for processes that start later."""
    unused: Any = None
    async with running_plane() as plane, Links({"s0": directory / "s0.sock"}, plane.clock) as links:
        control = ControlPlane(plane.routing, None, unused)
        kept = directory / "policy.json", directory / "shadows.json"
        front = Front(control, links, unused, CollectorRegistry(), *kept, report_rows_max=1)
        server, stop = HttpServer(front.app(token=""), "127.0.0.1", 0), asyncio.Event()
        await server.start()
        serving = asyncio.ensure_future(server.run(stop))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
            yield session
        stop.set()
        await serving


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, Any]:
    async with response:
        return response.status, (await response.json())["error"]


@pytest.mark.asyncio
async def test_shadows_that_no_process_checked_are_not_kept_for_later_processes(tmp_path: Path) -> None:
    async with front_alone(tmp_path) as session:
        status, error = await error_of(await session.put("/v1/shadows", data=b"no JSON"))
        assert (status, error["code"]) == (503, "no_process")
    assert not (tmp_path / "shadows.json").exists()


@pytest.mark.asyncio
async def test_that_no_process_answers_is_not_an_empty_list_of_decisions(tmp_path: Path) -> None:
    async with front_alone(tmp_path) as session:
        status, error = await error_of(await session.get("/v1/decisions"))
        assert (status, error["code"]) == (503, "no_process")
        status, error = await error_of(await session.get("/v1/decisions?limit=x"))
        assert (status, error["param"], error["message"]) == (400, "limit", 'limit: found "x", allowed 1..1000')
