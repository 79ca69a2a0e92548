"""One alert on its whole way: a metric, a real Prometheus with the committed rules, a real Alertmanager, a webhook."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from bench.demo.monitoring import alertmanager_command, monitoring
from bench.processes import ChildProcess, free_ports
from kv_runtime.telemetry import Projection
from router.processes.supervisor import ProcessState, process_families
from tests.support import processes
from tests.support.served import served
from tests.system.dashboards.prometheus import Prometheus
from tests.system.dashboards.shipped import GROUPS

pytestmark = pytest.mark.slow

READY_S = 30.0
PROCESS = "serving-1"


class Router:
    """Shows the metrics of a router's processes, and takes what a webhook is told."""

    def __init__(self) -> None:
        self.restarts = 0
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._registry = CollectorRegistry()
        Projection(self._registry, lambda: process_families([ProcessState(PROCESS, 1, True, self.restarts)], {}))

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/metrics", self.metrics), web.post("/webhook", self.webhook)])
        return app

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def webhook(self, request: web.Request) -> web.Response:
        await self.told.put(await request.json())
        return web.Response()


async def start_alertmanager(cleanup: AsyncExitStack, directory: Path, webhook_url: str) -> str:
    """Return the address of an Alertmanager that tells the webhook of every alert at once."""
    (port,) = free_ports(1)
    receiver = {"name": "webhook", "webhook_configs": [{"url": webhook_url}]}
    route = {"receiver": "webhook", "group_by": ["alertname"], "group_wait": "100ms"}
    command = alertmanager_command(directory, {"route": route, "receivers": [receiver]}, port)
    server = await cleanup.enter_async_context(processes.running(ChildProcess("alertmanager", command)))
    await server.line_with(f"address=127.0.0.1:{port}")
    return f"http://127.0.0.1:{port}"


class Running(NamedTuple):
    router: Router
    prometheus: Prometheus
    address: str


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Running]:
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        router = Router()
        url = await cleanup.enter_async_context(served(router.app()))
        alertmanager_url = await start_alertmanager(cleanup, directory, f"{url}/webhook")
        prometheus = Prometheus(session, directory)
        await prometheus.start(cleanup, {"kv-router": [url]}, alertmanager_url)
        yield Running(router, prometheus, url.removeprefix("http://"))


async def test_a_webhook_is_told_of_a_process_that_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as (router, prometheus, address):
        await prometheus.until("count_over_time(kvrouter_process_restarts_total[1m]) >= 2", READY_S)
        assert router.told.empty()
        router.restarts = 1
        async with asyncio.timeout(READY_S):
            told = await router.told.get()
    (alert,) = told["alerts"]
    assert (told["status"], alert["status"]) == ("firing", "firing")
    assert alert["labels"] == {
        "alertname": "KvRouterProcessRestarts",
        "instance": address,
        "process": PROCESS,
        "severity": "warning",
    }
    texts = alert["annotations"]
    assert texts["summary"] == f"Process {PROCESS} of router {address} ended and was started again"
    assert texts["description"].startswith(f"Process {PROCESS} of router {address} ended within the last 15 minutes.")
    assert texts["runbook_url"] == "docs/RUNBOOKS.md#kvrouterprocessrestarts"


async def test_what_the_demo_is_watched_with_has_the_rules_and_scrapes_each_job(tmp_path: Path) -> None:
    router = Router()
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        url = await cleanup.enter_async_context(served(router.app()))
        jobs = {"kv-router": [url], "kv-router-agents": [url]}
        prometheus_url, alertmanager_url = await cleanup.enter_async_context(monitoring(tmp_path, jobs))
        prometheus = Prometheus(session, tmp_path, prometheus_url)
        for job in ("kv-router", "kv-router-agents"):
            await prometheus.until(f'up{{job="{job}"}} == 1', READY_S)
        assert {each["name"] for each in await prometheus.api("rules")} == {group.name for group in GROUPS}
        async with session.get(f"{alertmanager_url}/api/v2/receivers") as response:
            assert await response.json() == [{"name": "none"}]
