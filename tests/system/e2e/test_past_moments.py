"""The tree of a past moment, restored by a process of its own: a real router on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from bench.ports import free_ports
from kv_runtime.clock import SystemClock
from tests.system.faults.children import Children
from tests.system.integration.broker import Broker
from tests.system.integration.event_path import connected
from tests.system.integration.scripted_rank import ScriptedRank

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]

WAIT_S = 60.0
QUIET = ("telemetry.log_level=error", "index.memory_bytes_max=268435456")


class Past:
    """A router, and a rank that does on its log what a test says."""

    def __init__(self, url: str, session: aiohttp.ClientSession, told: ScriptedRank) -> None:
        self._url, self._session, self.told = url, session, told

    async def call(self, path: str, status: int = 200, body: Any = None) -> Any:
        """Return the JSON of a GET, or with a body of a POST."""
        method = "GET" if body is None else "POST"
        async with self._session.request(method, self._url + path, json=body) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def until_roots(self, roots: set[str]) -> None:
        """Return once the live tree has these roots."""
        async with asyncio.timeout(WAIT_S):
            while await self.roots() != roots:
                await SystemClock().sleep(0.1)

    async def roots(self, moment: str = "") -> set[str]:
        """Return the first blocks of the tree, now or of a moment."""
        tree = await self.call("/v1/prefix-tree" + (f"?moment={moment}" if moment else ""))
        return {node["first"] for node in tree["nodes"]}

    async def moment(self, at_s: float) -> Any:
        """Return the moment's status once it is not being read."""
        status = await self.call("/v1/moments", 202, {"at_s": at_s})
        async with asyncio.timeout(WAIT_S):
            while status["state"] == "reading":
                await SystemClock().sleep(0.05)
                status = await self.call(f"/v1/moments/{status['id']}")
        return status


@asynccontextmanager
async def past(broker: Broker, processes: int) -> AsyncIterator[Past]:
    """The router runs, in so many serving processes; the rank told nothing yet."""
    data, control = free_ports(2)
    async with connected(broker.url) as log, Children() as children:
        ports = ("--port", str(data), "--control-port", str(control), "--processes", str(processes))
        router = ("router", *ports, "--nats-url", broker.url)
        await children.start_ours("router", *router, ready="control plane", settings=QUIET)
        told = ScriptedRank(log)
        await told.start()
        async with aiohttp.ClientSession() as session:
            yield Past(f"http://127.0.0.1:{control}", session, told)


async def test_the_tree_of_a_past_moment_has_what_was_removed_since(broker: Broker) -> None:
    clock = SystemClock()
    async with past(broker, 2) as shown:
        before_s = clock.wall_ns() / 1e9
        await shown.told.store(11, 12, 13)
        then_s = clock.wall_ns() / 1e9
        await shown.told.remove(13, 12, 11)
        await shown.told.store(21, 22)
        await shown.until_roots({"21"})
        moment = await shown.moment(then_s)
        assert (moment["state"], moment["stream_seq"], moment["progress"]) == ("ready", 1, {"messages": 1, "of": 1})
        tree = await shown.call(f"/v1/prefix-tree?moment={moment['id']}")
        (node,) = tree["nodes"]
        assert (node["first"], node["last"], node["blocks"], node["holders"]) == ("11", "13", 3, 1)
        assert (node["heat"], node["stored_ago_s"]) == (None, None)
        assert "11" not in await shown.roots()
        earlier = await shown.moment(before_s)
        assert earlier["state"] == "failed"
        assert earlier["message"].startswith("time: found ")
        refused = await shown.call(f"/v1/prefix-tree?moment={earlier['id']}", 409)
        assert (refused["error"]["code"], refused["error"]["message"]) == ("moment_not_ready", earlier["message"])
