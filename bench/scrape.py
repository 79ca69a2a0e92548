"""`router bench scrape`: what a scrape of a router's metrics costs with many worker ranks.

A router runs on a real nats-server. Workers are registered there, and every rank sends heartbeats, so that the router
and its index know all of them. Then `/metrics` is read several times, while another client asks the data plane's
`/health` without a pause: the longest of its answers is how long the scrape held requests up. CPU is the router's own,
so that other programs on the machine disturb it little.
"""

import asyncio
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

import aiohttp
import click
import msgspec
import psutil

from bench.processes import ChildProcess
from bench.report import machine_line
from bench.routing.virtual_worker import MODEL, describe, registered
from indexer.embedded import ensure_streams
from kv_protocol import fleet, subjects
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.nats_server import EmbeddedNats

RANKS_A_WORKER = 8
_SCRAPES, _EPOCH = 5, 1
_READY_S, _LOOK_S = 300.0, 0.5
_RANKS_SHOWN, _RANKS_INDEXED = b"kvrouter_rank_fit{", b"kvrouter_stream_stale{"
SLOTS = 4096
"""Ranks that an index has room for."""
_MIB = 1 << 20


class Scraped(NamedTuple):
    """One scrape: its size, the router's CPU, how long it took, the longest answer to `/health` meanwhile; seconds."""

    size_bytes: int
    samples: int
    cpu_s: float
    seconds: float
    held_up_s: float


async def measure(ranks: int) -> tuple[list[Scraped], float]:
    """Return the scrapes of a router with so many ranks, and the longest answer of `/health` without one."""
    async with EmbeddedNats(port=0) as nats, asyncio.TaskGroup() as group:
        log = await EventLog.connect(nats.url, name="bench")
        await ensure_streams(log, NatsSection())
        await _register(log, ranks)
        command = ["-m", "router", "--port", "0", "--control-port", "0", "--nats-url", nats.url]
        router = ChildProcess("router", [sys.executable, *command, "--set", "telemetry.log_level=error"])
        await router.start(group)
        data, control = [(await router.line_with(words)).split()[2] for words in ("router on", "control plane")]
        async with aiohttp.ClientSession() as session:
            await _until_shown(session, control, _RANKS_SHOWN, ranks)
            beating = group.create_task(_beat(log, ranks))
            alone = await _longest(session, data, asyncio.create_task(asyncio.sleep(1.0)))
            await _until_shown(session, control, _RANKS_INDEXED, min(ranks, SLOTS))
            found = [await _scraped(session, control, data, psutil.Process(router.pid)) for _ in range(_SCRAPES)]
        beating.cancel()
        await router.end()
        await log.close()
    return found, alone


async def _register(log: EventLog, ranks: int) -> None:
    for first in range(0, ranks, RANKS_A_WORKER):
        worker_id, dp_ranks = f"w{first}", tuple(range(min(RANKS_A_WORKER, ranks - first)))
        facts = registered(WorkerRank(worker_id, 0), describe(kv_tokens=1 << 16, block_size=16, max_seq_len=1 << 14))
        joined = msgspec.structs.replace(facts, dp_ranks=dp_ranks)
        await log.publish(subjects.fleet(MODEL, worker_id), fleet.encode(joined))


async def _beat(log: EventLog, ranks: int) -> None:
    """Send a heartbeat of every rank each second, so that the index has a slot for it, as far as it has room."""
    while True:
        for number in range(ranks):
            first = number - number % RANKS_A_WORKER
            rank = WorkerRank(f"w{first}", number - first)
            heartbeat = fleet.encode(Heartbeat(instance=f"{rank.worker_id}-1", epoch=_EPOCH, last_seq=0))
            await log.announce(subjects.heartbeat(MODEL, rank), heartbeat)
        await SystemClock().sleep(HEARTBEAT_PERIOD_S)


async def _until_shown(session: aiohttp.ClientSession, control: str, series: bytes, count: int) -> None:
    async with asyncio.timeout(_READY_S):
        while (await _page(session, control)).count(series) < count:
            await SystemClock().sleep(_LOOK_S)


async def _page(session: aiohttp.ClientSession, control: str) -> bytes:
    async with session.get(f"{control}/metrics") as response:
        return await response.read()


async def _scraped(session: aiohttp.ClientSession, control: str, data: str, router: psutil.Process) -> Scraped:
    began_s, cpu_s = perf_counter(), _cpu_s(router)
    scrape = asyncio.create_task(_page(session, control))
    held_up_s = await _longest(session, data, scrape)
    page = await scrape
    samples = sum(not line.startswith(b"#") for line in page.splitlines())
    return Scraped(len(page), samples, _cpu_s(router) - cpu_s, perf_counter() - began_s, held_up_s)


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


async def _longest(session: aiohttp.ClientSession, data: str, during: "asyncio.Task[object]") -> float:
    """Return the longest time of an answer while the task is not done."""
    longest_s = 0.0
    while not during.done():
        began_s = perf_counter()
        async with session.get(f"{data}/health") as response:
            await response.read()
        longest_s = max(longest_s, perf_counter() - began_s)
    return longest_s


def lines(ranks: int, found: list[Scraped], alone_s: float) -> Iterator[str]:
    """Yield the figures as a Markdown table."""
    yield f"{ranks:,} ranks, {RANKS_A_WORKER} a worker; median of {len(found)} scrapes, and the worst\n"
    yield "| samples | size, MiB | CPU, s | time, s | /health held up, ms | without a scrape, ms |"
    yield "|---:|---:|---:|---:|---:|---:|"
    size, cpu_s = found[-1].size_bytes / _MIB, median(each.cpu_s for each in found)
    took, held_up = [each.seconds for each in found], [each.held_up_s * 1000 for each in found]
    yield (
        f"| {found[-1].samples:,} | {size:.1f} | {cpu_s:.2f} | {median(took):.2f}, {max(took):.2f}"
        f" | {median(held_up):.0f}, {max(held_up):.0f} | {alone_s * 1000:.0f} |"
    )


@click.command()
@click.option("--ranks", type=click.IntRange(min=1, max=100_000), default=10_000, help="worker ranks in the fleet")
def scrape(ranks: int) -> None:
    """Measure a scrape of a router's metrics with many ranks: size, time, and how long it holds requests up."""
    click.echo(machine_line())
    found, alone_s = asyncio.run(measure(ranks))
    for line in lines(ranks, found, alone_s):
        click.echo(line)
