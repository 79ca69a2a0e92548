"""Prometheus and Alertmanager on loopback, with the rules of `dashboards/`: their configurations, commands, processes.

async with monitoring(directory, {"kv-router": [control_url]}) as (prometheus_url, alertmanager_url): ...
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from bench.processes import ChildProcess, free_ports
from dashboards.command import rules

PROMETHEUS, ALERTMANAGER = "prometheus", "prometheus-alertmanager"
"""The names of the programs, and of their Debian packages."""
PROMETHEUS_READY = "Server is ready to receive web requests"
SCRAPE_S = 1
_RETENTION = "1h"
_NO_RECEIVER = {"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}
"""Alerts are shown on Alertmanager's page, and sent nowhere."""

Jobs = Mapping[str, Sequence[str]]
"""Addresses by the name of their job, which must be that in `configs/prometheus.yml`: the rules use it."""


class ProgramMissing(Exception):
    """A program is not installed; the message names its package."""


def program(name: str, package: str = "") -> str:
    """Return the path of a program; its Debian package has the same name, unless `package` is given.

    Raises:
        ProgramMissing: there is none.
    """
    found = shutil.which(name)
    if found is None:
        raise ProgramMissing(f"{name}: found no such program, allowed: that of the Debian package `{package or name}`")
    return found


def prometheus_configuration(jobs: Jobs, rule_file: Path, alertmanager_url: str = "") -> dict[str, Any]:
    """Return Prometheus's configuration: it scrapes the jobs and evaluates the rules once a second."""
    scraped = [{"job_name": job, "static_configs": [_at(*urls)]} for job, urls in jobs.items()]
    every = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s")
    alerting = {"alertmanagers": [{"static_configs": [_at(alertmanager_url)]}]} if alertmanager_url else {}
    return {"global": every, "scrape_configs": scraped, "rule_files": [str(rule_file)], "alerting": alerting}


def prometheus_command(directory: Path, configuration: Mapping[str, Any], port: int) -> list[str]:
    """Return the command of a server that keeps its data in `directory`; write its configuration there."""
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(dict(configuration)))
    command = [program(PROMETHEUS), f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    command.append("--enable-feature=exemplar-storage")
    return [*command, f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.retention.time={_RETENTION}"]


def alertmanager_command(directory: Path, configuration: Mapping[str, Any], port: int) -> list[str]:
    """Return the command of an Alertmanager without peers; use `directory` as `prometheus_command` does."""
    file = directory / "alertmanager.yaml"
    file.write_text(yaml.safe_dump(dict(configuration)))
    command = [program(ALERTMANAGER), f"--config.file={file}", f"--storage.path={directory / 'alertmanager'}"]
    return [*command, f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]


@asynccontextmanager
async def monitoring(directory: Path, jobs: Jobs) -> AsyncIterator[tuple[str, str]]:
    """Run Prometheus and Alertmanager during the block, with their files in `directory`; yield the URLs of both.

    Raises:
        ProgramMissing: one of them is not installed.
        ProcessFailed: one of them did not start.
    """
    prometheus_port, alertmanager_port = free_ports(2)
    alertmanager_url = f"http://127.0.0.1:{alertmanager_port}"
    rule_file = directory / "kv-router.rules.yaml"
    rule_file.write_bytes(rules())
    configuration = prometheus_configuration(jobs, rule_file, alertmanager_url)
    alertmanager = ChildProcess("alertmanager", alertmanager_command(directory, _NO_RECEIVER, alertmanager_port))
    prometheus = ChildProcess("prometheus", prometheus_command(directory, configuration, prometheus_port))
    async with asyncio.TaskGroup() as group:
        try:
            await alertmanager.start(group)
            await alertmanager.line_with(f"address=127.0.0.1:{alertmanager_port}")
            await prometheus.start(group)
            await prometheus.line_with(PROMETHEUS_READY)
            yield f"http://127.0.0.1:{prometheus_port}", alertmanager_url
        finally:
            await asyncio.gather(*(each.end() for each in (prometheus, alertmanager)))


def _at(*urls: str) -> dict[str, list[str]]:
    return {"targets": [url.removeprefix("http://") for url in urls]}
