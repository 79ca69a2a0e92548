"""The control plane of a router in several processes, of which at most one answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_runtime.http.server import HttpServer
from router.admin.control_plane import ControlPlane
from router.decision.policy_store import PolicyStore
from router.processes.front import Front
from router.processes.links import Links
from tests.unit.router.plane import running_plane


@asynccontextmanager
async def front_alone(directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Run it; yield a session to its address. `directory` has what it keeps for processes that start later."""
    unused: Any = None
    async with running_plane() as plane, Links({"s0": directory / "s0.sock"}, plane.clock) as links:
        policies = PolicyStore("", plane.routing.policy, plane.routing.state.modes)
        policies.share(directory / "policy.json")
        control = ControlPlane(plane.routing, None, unused, policies=policies)
        front = Front(control, links, unused, CollectorRegistry(), directory / "shadows.json", report_rows_max=1)
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


async def test_shadows_that_no_process_checked_are_not_kept_for_later_processes(tmp_path: Path) -> None:
    async with front_alone(tmp_path) as session:
        status, error = await error_of(await session.put("/v1/shadows", data=b"no JSON"))
        assert (status, error["code"]) == (503, "no_process")
    assert not (tmp_path / "shadows.json").exists()


@pytest.mark.parametrize("method", ["PATCH", "PUT", "DELETE"])
async def test_a_policy_that_cannot_be_kept_for_later_processes_changes_nothing(tmp_path: Path, method: str) -> None:
    async with front_alone(tmp_path) as session:
        before = await (await session.get("/v1/policy")).json()
        (tmp_path / "policy.new").mkdir()  # where the file is written first
        status, error = await error_of(await session.request(method, "/v1/policy", data=b'{"mode": "random"}'))
        assert (status, error["code"]) == (503, "not_stored")
        assert await (await session.get("/v1/policy")).json() == before


async def test_the_processes_that_did_not_take_a_changed_policy_are_named(tmp_path: Path) -> None:
    async with front_alone(tmp_path) as session:
        status, error = await error_of(await session.patch("/v1/policy", data=b'{"mode": "random"}'))
        assert (status, error["code"]) == (503, "not_confirmed")
        assert error["message"].startswith("s0 did not confirm the change")
        assert (await (await session.get("/v1/policy")).json())["mode"] == "random"


async def test_that_changed_shadows_are_not_kept_for_later_processes_is_told(tmp_path: Path) -> None:
    async def changed(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.delete("/v1/shadows", changed)])
    serving = web.AppRunner(app)
    await serving.setup()
    await web.UnixSite(serving, str(tmp_path / "s0.sock")).start()
    (tmp_path / "shadows.json").mkdir()
    async with front_alone(tmp_path) as session:
        status, error = await error_of(await session.delete("/v1/shadows"))
        assert (status, error["code"]) == (503, "not_stored")
    await serving.cleanup()


async def test_that_no_process_answers_is_not_an_empty_list_of_decisions(tmp_path: Path) -> None:
    async with front_alone(tmp_path) as session:
        status, error = await error_of(await session.get("/v1/decisions"))
        assert (status, error["code"]) == (503, "no_process")
        status, error = await error_of(await session.get("/v1/decisions?limit=x"))
        assert (status, error["param"], error["message"]) == (400, "limit", 'limit: found "x", allowed 1..1000')
