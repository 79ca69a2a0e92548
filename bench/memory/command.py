"""`router bench memory`: the memory of a router in one process and in several, with blocks held.

Batches of eight ranks are published on a real nats-server. Then a router is started for each number of processes, and
measured once its index holds all blocks. What processes share counts once: the figures are sums of the proportional
set size (PSS), which divides a page by the processes that map it. Source: Linux, Documentation/filesystems/proc.rst.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import aiohttp
import click
import psutil

from bench.processes import ChildProcess
from bench.report import machine_line
from indexer.embedded import ensure_streams
from kv_protocol import codec, fleet, subjects
from kv_protocol.digest import SetDigest
from kv_protocol.events import Batch, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import splitmix64
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.nats_server import EmbeddedNats

RANKS, CHAIN_BLOCKS, EPOCH = 8, 128, 1
_MODEL = "m"
_BATCHES_A_MESSAGE = 16
_READY_S, _POLL_S, _BEAT_S = 300.0, 0.2, 1.0
_MIB = 1 << 20
_LOOKS = 25
"""Of which the least counts: while a snapshot is written it is in memory, too."""


class Measured(NamedTuple):
    """One router: its serving processes, and the PSS of each of its processes in bytes."""

    processes: int
    pss_bytes: dict[str, int]

    @property
    def all_bytes(self) -> int:
        """All of it."""
        return sum(self.pss_bytes.values())


class Rank:
    """A rank that holds chains of blocks, and says so."""

    def __init__(self, number: int, blocks: int) -> None:
        self.rank = WorkerRank(f"w{number}", 0)
        self._number, self._chains = number, blocks // CHAIN_BLOCKS
        self._digest = SetDigest(())

    def messages(self) -> Iterator[bytes]:
        """Yield the messages of its stream."""
        for first in range(0, self._chains, _BATCHES_A_MESSAGE):
            last = min(first + _BATCHES_A_MESSAGE, self._chains)
            yield codec.encode_message([self._batch(number) for number in range(first, last)])

    def _batch(self, number: int) -> Batch:
        begin = (self._number << 40) + number * CHAIN_BLOCKS
        hashes = tuple(splitmix64(begin + at) for at in range(CHAIN_BLOCKS))
        for each in hashes:
            self._digest.add(each)
        return Batch(EPOCH, number + 1, Stored(hashes))

    def heartbeat(self) -> bytes:
        """Return what it says of itself once all is published."""
        tiers = (self._digest.of_tier(Tier.GPU),)
        return fleet.encode(Heartbeat(instance="i", epoch=EPOCH, last_seq=self._chains, tiers=tiers))


async def measure(blocks: int, numbers: tuple[int, ...], text: str) -> list[Measured]:
    """Return the memory of a router for each number of serving processes."""
    ranks = [Rank(number, blocks // RANKS) for number in range(RANKS)]
    async with EmbeddedNats(port=0) as nats, asyncio.TaskGroup() as group:
        log = await EventLog.connect(nats.url, name="bench")
        await ensure_streams(log, NatsSection())
        for rank in ranks:
            for message in rank.messages():
                await log.publish(subjects.events(_MODEL, rank.rank), message)
        beating = group.create_task(_beat(log, ranks))
        found = [await _measured(number, (nats.url, text), blocks, group) for number in numbers]
        beating.cancel()
        await log.close()
    return found


async def _beat(log: EventLog, ranks: list[Rank]) -> None:
    while True:
        for rank in ranks:
            await log.announce(subjects.heartbeat(_MODEL, rank.rank), rank.heartbeat())
        await SystemClock().sleep(_BEAT_S)


async def _measured(number: int, given: tuple[str, str], blocks: int, group: asyncio.TaskGroup) -> Measured:
    url, text = given
    options = ["--processes", str(number), "--port", "0", "--control-port", "0", "--nats-url", url, "--text", text]
    router = ChildProcess(f"router, {number}", [sys.executable, "-m", "router", *options])
    await router.start(group)
    control = (await router.line_with("control plane")).split()[2]
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession(control) as session:
        while await _held(session) < blocks // CHAIN_BLOCKS // RANKS * CHAIN_BLOCKS * RANKS or await _reads(session):
            await SystemClock().sleep(_POLL_S)
        names = await _names(session)
    found = list[Measured]()
    for _ in range(_LOOKS):
        await SystemClock().sleep(_POLL_S)
        found.append(Measured(number, _pss(router.pid, names, "router" if number == 1 else "others")))
    await router.end()
    return min(found, key=lambda each: each.all_bytes)


def _pss(pid: int, names: dict[int, str], otherwise: str) -> dict[str, int]:
    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    found = Counter[str]()
    for each in tree:
        found[names.get(each.pid, otherwise)] += each.memory_full_info().pss
    return dict(found)


async def _held(session: aiohttp.ClientSession) -> int:
    async with session.get("/v1/index") as response:
        return int((await response.json())["index"]["held_blocks"])


async def _reads(session: aiohttp.ClientSession) -> bool:
    """Return whether one of the processes still reads the log."""
    async with session.get("/ready") as response:
        return "log: " in await response.text()


async def _names(session: aiohttp.ClientSession) -> dict[int, str]:
    async with session.get("/v1/processes") as response:
        found = await response.json(content_type=None)
        return {each["pid"]: each["name"] for each in found.get("processes", ())}


def lines(found: list[Measured], blocks: int) -> Iterator[str]:
    """Yield the figures as a Markdown table."""
    alone = found[0].all_bytes
    yield f"PSS with {blocks:,} blocks held, MiB\n"
    yield "| serving processes | all | ratio | of these |\n|---:|---:|---:|---|"
    for each in found:
        parts = ", ".join(f"{name} {pss / _MIB:.0f}" for name, pss in sorted(each.pss_bytes.items()))
        yield f"| {each.processes} | {each.all_bytes / _MIB:.0f} | {each.all_bytes / alone:.2f}x | {parts} |"


@click.command()
@click.option("--text", default="byte", help="the router's tokenizer: byte, or a local model directory")
@click.option("--blocks", type=click.IntRange(min=RANKS * CHAIN_BLOCKS), default=1_000_000, help="that the index holds")
@click.option("--processes", "numbers", default="1,2,4", help="numbers of serving processes, the first for the ratios")
def memory(blocks: int, numbers: str, text: str) -> None:
    """Measure a router's memory in one process and in several."""
    click.echo(machine_line())
    found = asyncio.run(measure(blocks, tuple(int(each) for each in numbers.split(",")), text))
    for line in lines(found, blocks):
        click.echo(line)
