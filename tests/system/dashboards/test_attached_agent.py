"""The queries of attached engines and of engines that publish, on a real Prometheus that scraped a real `attach`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import time
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from tests.system.dashboards.prometheus import Prometheus
from tests.system.dashboards.shipped import Shown, panel_queries, selectors, substituted
from tests.system.dashboards.test_prometheus import ATTACHED, INTERVAL, PUBLISHES, WINDOW, WITHOUT_SERIES
from tests.system.e2e.test_attached_engines import MODEL, PROMPT, Cluster, attaching, running_cluster
from tests.system.faults.fleet import READY_S
from tests.system.integration.engine_doubles import Rank, VllmDouble

pytestmark = pytest.mark.slow

WORKER = "va"
_REQUESTS, _SCRAPES = 5, 4


class Lived(NamedTuple):
    prometheus: Prometheus
    began_s: float
    ended_s: float


def queries() -> list[Shown]:
    """Return those that the other fleet has no series for, and this one has."""
    ours = {f"kvrouter_{name}" for name, why in WITHOUT_SERIES.items() if why in {ATTACHED, PUBLISHES}}
    return [shown for shown in panel_queries() if any(each.name in ours for each in selectors(shown.expr))]


@asynccontextmanager
async def forwarding_agent(cluster: Cluster) -> AsyncIterator[str]:
    """An agent speaks for an engine that publishes, and forwards its requests; return the agent's address."""
    forward = ("--set", "engine.requests=forward")
    async with (
        VllmDouble(model=MODEL, ranks=[Rank()]).serving() as engine,
        attaching(cluster, WORKER, engine.url, *forward) as (_, process),
    ):
        yield (await process.line_with("status on")).split()[-1]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def lived(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lived]:
    directory = tmp_path_factory.mktemp("prometheus")
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        cluster = await cleanup.enter_async_context(running_cluster())
        agent_url = await cleanup.enter_async_context(forwarding_agent(cluster))
        prometheus = Prometheus(session, directory)
        await prometheus.start(cleanup, {"kv-router-agents": [agent_url]})
        began_s = time()
        await cluster.until_routed(PROMPT, WORKER, 0)
        for _ in range(_REQUESTS):
            assert (await cluster.complete(PROMPT)).status == 200
        await prometheus.until(f"sum(kvrouter_forwarded_requests_total) >= {_REQUESTS}", READY_S)
        for counted in ("kvrouter_zmq_gaps_total", "kvrouter_forwarded_requests_total"):
            await prometheus.until(f"count_over_time({counted}[1m]) >= {_SCRAPES}", READY_S)
        yield Lived(prometheus, began_s, time())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("shown", queries(), ids=str)
async def test_every_query_of_attached_engines_has_data(lived: Lived, shown: Shown) -> None:
    expr = substituted(shown.expr, interval=INTERVAL, window=WINDOW)
    await lived.prometheus.range(expr, lived.began_s, lived.ended_s)
