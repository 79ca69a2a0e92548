"""A real Prometheus of the test's own: what it scraped, asked over its HTTP API as Grafana asks it.

    answer is    error        the query is refused
                 empty        no series
                 not numbers  every value of every series is NaN
Each fails, and names the query.
"""

import json
import math
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bench.demo.monitoring import PROMETHEUS_READY, SCRAPE_S, Jobs, prometheus_command, prometheus_configuration
from bench.processes import ChildProcess, free_ports
from dashboards.command import RULES
from kv_runtime.clock import Clock
from tests.support.paths import ROOT
from tests.support.processes import running
from tests.system.dashboards.picture import Series
from tests.system.faults.fleet import Fleet
from tests.system.faults.traffic import MODEL
from tests.system.integration.pool_routers import agg

_LOOK_S = 0.1


class NoData(AssertionError):
    """A query was refused, or answered by nothing."""


class Prometheus:
    """One server, between `start` and the end of the block that it was given."""

    def __init__(self, session: aiohttp.ClientSession, directory: Path, url: str = "") -> None:
        """`url`: that of one that runs already."""
        self._session, self._directory = session, directory
        (self._port,) = free_ports(1)
        self.url = url or f"http://127.0.0.1:{self._port}"

    async def start(self, cleanup: AsyncExitStack, jobs: Jobs, alertmanager_url: str = "") -> None:
        """It scrapes these addresses, by job, once a second, and evaluates the committed rules.

        Raises:
            ProgramMissing: it is not installed.
        """
        configuration = prometheus_configuration(jobs, ROOT / "dashboards" / RULES, alertmanager_url)
        command = prometheus_command(self._directory, configuration, self._port)
        server = await cleanup.enter_async_context(running(ChildProcess("prometheus", command)))
        await server.line_with(PROMETHEUS_READY)

    async def until(self, expr: str, within_s: float) -> None:
        """Return once an instant query has an answer."""
        for _ in range(round(within_s / _LOOK_S)):
            if await self.api("query", query=expr):
                return
            await Clock().sleep(_LOOK_S)
        raise AssertionError(f"no answer within {within_s} s: {expr}")

    async def range(self, expr: str, start_s: float, end_s: float) -> None:
        """There are numbers somewhere between these times.

        Raises:
            NoData: there are none, or it is no query.
        """
        step = max(SCRAPE_S, round((end_s - start_s) / 1000))
        _judge(expr, await self.api("query_range", query=expr, start=f"{start_s}", end=f"{end_s}", step=f"{step}"))

    async def series(self, expr: str, start_s: float, end_s: float) -> list[Series]:
        """Return the answer of every second; its times begin at 0."""
        found = await self.api("query_range", query=expr, start=f"{start_s}", end=f"{end_s}", step="1")
        each = [Series(one["metric"], [(at - start_s, float(value)) for at, value in one["values"]]) for one in found]
        numbers = [Series(labels, [point for point in points if math.isfinite(point[1])]) for labels, points in each]
        return [series for series in numbers if series.points]

    async def instant(self, expr: str, at_s: float) -> None:
        """There are numbers at this time; raise `NoData` else."""
        _judge(expr, await self.api("query", query=expr, time=f"{at_s}"))

    async def label_values(self, metric: str, label: str) -> list[str]:
        """Return what Grafana offers for a variable."""
        found = await self.api(f"label/{label}/values", **{"match[]": metric})
        return [str(value) for value in found]

    async def api(self, path: str, **parameters: str) -> list[Any]:
        """Return what is answered; raise `NoData` where the query is refused."""
        async with self._session.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        if answer["status"] != "success":
            raise NoData(f"{answer.get('error')}: {parameters}")
        data = answer["data"]
        return list(data if isinstance(data, list) else data["groups" if path == "rules" else "result"])


def _judge(expr: str, series: list[Any]) -> None:
    if not series:
        raise NoData(f"empty: {expr}")
    values = [value for each in series for _, value in each.get("values", [each.get("value")])]
    if all(math.isnan(float(value)) for value in values):
        raise NoData(f"not a number in {len(values)} values of {len(series)} series: {expr}")


CONFIG = {
    **agg(0),
    "pools": {"look_period_s": 0.2, "ttft_bound_ms": 60_000, "itl_bound_ms": 60_000, "window_requests_min": 1},
}


async def start_pools(cleanup: AsyncExitStack, fleet: Fleet, directory: Path) -> tuple[str, str]:
    """Return the addresses of its data plane and of its control plane."""
    file = directory / "pools.json"
    file.write_text(json.dumps(CONFIG))
    pool = f"--pool=p0={fleet.data_url},{fleet.control_url}"
    command = ["pools", "--config", str(file), "--model-name", MODEL, "--port", "0", "--control-port", "0", pool]
    process = ChildProcess("pools", [sys.executable, "-m", "router", *command])
    child = await cleanup.enter_async_context(running(process))
    data, control = [(await child.line_with(words)).split()[2] for words in ("pools on", "control plane")]
    return data, control
