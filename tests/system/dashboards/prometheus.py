"""A real Prometheus of the test's own: what it scraped, asked over its HTTP API as Grafana asks it.

    answer is    error        the query is refused
                 empty        no series
                 not numbers  every value of every series is NaN
Each fails, and names the query.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench.processes import free_ports
from dashboards.files import RULES
from kv_runtime.clock import SystemClock
from tests.support.paths import ROOT
from tests.system.faults.children import Children

SCRAPE_S = 1
_READY = "Server is ready to receive web requests"
_LOOK_S = 0.1
_RETENTION = "1h"


class PrometheusMissing(Exception):
    """There is no Prometheus on this machine."""


class NoData(AssertionError):
    """A query was refused, or answered by nothing."""


class Prometheus:
    """One server, between `start` and the end of its `Children`."""

    def __init__(self, session: aiohttp.ClientSession, directory: Path) -> None:
        self._session, self._directory = session, directory
        (self._port,) = free_ports(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self, children: Children, jobs: Mapping[str, Sequence[str]], alertmanager_url: str = "") -> None:
        """It scrapes these addresses, by job, once a second; its alerts go to the Alertmanager, if there is one.

        Raises:
            PrometheusMissing: it is not installed.
        """
        configuration = self._directory / "prometheus.yaml"
        content = _configuration(jobs) | (_alerting(alertmanager_url) if alertmanager_url else {})
        configuration.write_text(yaml.safe_dump(content))
        command = [program(), f"--config.file={configuration}", f"--storage.tsdb.path={self._directory / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{self._port}", f"--storage.tsdb.retention.time={_RETENTION}"]
        await children.start("prometheus", command, ready=_READY)

    async def until(self, expr: str, within_s: float) -> None:
        """Return once an instant query has an answer."""
        for _ in range(round(within_s / _LOOK_S)):
            if await self.api("query", query=expr):
                return
            await SystemClock().sleep(_LOOK_S)
        raise AssertionError(f"no answer within {within_s} s: {expr}")

    async def range(self, expr: str, start_s: float, end_s: float) -> None:
        """There are numbers somewhere between these times.

        Raises:
            NoData: there are none, or it is no query.
        """
        step = max(SCRAPE_S, round((end_s - start_s) / 1000))
        _judge(expr, await self.api("query_range", query=expr, start=f"{start_s}", end=f"{end_s}", step=f"{step}"))

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
        return list(data if isinstance(data, list) else data["result"])


def program(name: str = "prometheus") -> str:
    """Return a program of the server's package, or the Alertmanager's.

    Raises:
        PrometheusMissing: there is none.
    """
    found = shutil.which(name)
    if found is None:
        package = name if name == "prometheus-alertmanager" else "prometheus"
        raise PrometheusMissing(f"{name}: found no such program, allowed: that of the Debian package `{package}`")
    return found


def _configuration(jobs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    scraped = [
        {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}
        for job, urls in jobs.items()
    ]
    every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    return {"global": every, "scrape_configs": scraped}


def _alerting(alertmanager_url: str) -> dict[str, Any]:
    targets = [{"static_configs": [{"targets": [alertmanager_url.removeprefix("http://")]}]}]
    return {"rule_files": [str(ROOT / "dashboards" / RULES)], "alerting": {"alertmanagers": targets}}


def _judge(expr: str, series: list[Any]) -> None:
    if not series:
        raise NoData(f"empty: {expr}")
    values = [value for each in series for _, value in each.get("values", [each.get("value")])]
    if all(math.isnan(float(value)) for value in values):
        raise NoData(f"not a number in {len(values)} values of {len(series)} series: {expr}")
