"""`PUT /v1/shadows` of a router in several processes, of which none answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kv_runtime.http.server import HttpServer
from router.admin.control_plane import ControlPlane
from router.processes.front import Front
from router.processes.links import Links
from tests.unit.router.plane import running_plane


@pytest.mark.asyncio
async def test_shadows_that_no_process_checked_are_not_kept_for_later_processes(tmp_path: Path) -> None:
    unused: Any = None
    kept = tmp_path / "shadows.json"
    async with running_plane() as plane, Links({"s0": tmp_path / "s0.sock"}, plane.clock) as links:
        control = ControlPlane(plane.routing, None, unused)
        front = Front(control, links, unused, CollectorRegistry(), tmp_path / "policy.json", kept, report_rows_max=1)
        server, stop = HttpServer(front.app(token=""), "127.0.0.1", 0), asyncio.Event()
        await server.start()
        serving = asyncio.ensure_future(server.run(stop))
        async with plane.session.put(f"http://127.0.0.1:{server.port}/v1/shadows", data=b"no JSON") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_process"
        stop.set()
        await serving
    assert not kept.exists()
