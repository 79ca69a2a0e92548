"""Figures of processes, from the operating system and from /metrics."""

from collections import Counter
from typing import NamedTuple

import aiohttp
import psutil

_PREFIX = "kvrouter_"


class ResourceSample(NamedTuple):
    """The resources of a process at one moment."""

    rss_bytes: int
    descriptors: int
    threads: int
    cpu_s: float
    """Since it began."""


class Quiet(NamedTuple):
    """One moment at which no request was in flight."""

    requests: int
    """Requests that had ended until then."""
    router: ResourceSample
    nats: ResourceSample
    workers: dict[str, ResourceSample]
    metrics: Counter[str]
    """The router's, summed over labels."""
    clients: int
    """Connections that clients have open."""
    store_bytes: int
    """Disk that the nats-server's store takes."""
    verified: str
    """The differences that `indexer verify` found; empty: none."""


def taken(pid: int, *, sockets: int = 0) -> ResourceSample:
    """Return the resources of a running process, without `sockets`, which its clients have open."""
    process = psutil.Process(pid)
    with process.oneshot():
        cpu = process.cpu_times()
        return ResourceSample(
            process.memory_info().rss, process.num_fds() - sockets, process.num_threads(), cpu.user + cpu.system
        )


def one_request_sessions() -> aiohttp.ClientSession:
    """Return a session that keeps no connection open, so that it does not change the counted figures."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def totals(session: aiohttp.ClientSession, url: str) -> Counter[str]:
    """Return the metrics of a process, each without its prefix and summed over its labels."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    sums: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(_PREFIX):
            sample, _, value = line.rpartition(" ")
            sums[sample.partition("{")[0].removeprefix(_PREFIX)] += float(value)  # type: ignore[assignment]
    return sums
