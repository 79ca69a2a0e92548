"""What may not be asked of the control plane is a 400 that names it, whatever was written there."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from kv_protocol.ids import WorkerRank
from kv_runtime.http import HttpServer
from router.control_plane import ControlPlane
from tests.unit.router.plane import Answered, Plane, running_plane


class NeverThere:
    """An index that never gets to any position."""

    implementation = "native"

    async def wait_for(self, _rank: WorkerRank, _epoch: int, _seq: int) -> None:
        """Wait."""
        await asyncio.Event().wait()


class Control:
    """A control plane on a port that the system chose."""

    def __init__(self, plane: Plane) -> None:
        index: Any = NeverThere()
        log: Any = None  # nothing is published here
        app = ControlPlane(plane.routing, index, log).app(CollectorRegistry(), token="")
        self.plane = plane
        self.server = HttpServer(app, "127.0.0.1", 0)

    async def get(self, path: str) -> Answered:
        """Get a path."""
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.plane.session.get(url) as response:
            return Answered(response.status, response.headers.copy(), await response.read())


@pytest_asyncio.fixture
async def control() -> AsyncIterator[Control]:
    stop = asyncio.Event()
    stop.set()
    async with running_plane() as plane:
        running = Control(plane)
        await running.server.start()
        yield running
        await running.server.run(stop)


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "²", "9" * 5000])
async def test_a_bad_limit_is_named(control: Control, limit: str) -> None:
    answered = await control.get(f"/v1/decisions?limit={limit}")
    assert (answered.status, answered.error["param"]) == (400, "limit")


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["x", "-1", "", "9" * 5000])
@pytest.mark.parametrize("field", ["dp_rank", "epoch", "seq"])
async def test_a_bad_position_is_named(control: Control, field: str, value: str) -> None:
    query = {"dp_rank": "0", "epoch": "1", "seq": "1"} | {field: value}
    path = "&".join(f"{name}={each}" for name, each in query.items())
    answered = await control.get(f"/v1/index/position?worker=w0&timeout_s=0&{path}")
    assert (answered.status, answered.error["param"]) == (400, field)


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "soon", ""])
async def test_a_wait_that_is_no_time_is_named(control: Control, value: str) -> None:
    answered = await control.get(f"/v1/index/position?worker=w0&epoch=1&seq=1&timeout_s={value}")
    assert (answered.status, answered.error["param"]) == (400, "timeout_s")


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["0", "-5", "0.01"])
async def test_a_wait_that_is_over_says_so(control: Control, value: str) -> None:
    answered = await control.get(f"/v1/index/position?worker=w0&epoch=1&seq=1&timeout_s={value}")
    assert (answered.status, answered.error["code"]) == (504, "not_reached")


@pytest.mark.asyncio
async def test_version_says_which_index_serves(control: Control) -> None:
    answered = await control.get("/version")
    assert (answered.status, json.loads(answered.body)["index"]) == (200, "native")
