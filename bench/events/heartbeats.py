"""Heartbeats: what heartbeats with digests cost while nothing else happens, by number of ranks.

One agent has all the ranks, each with blocks. Its CPU and that of an index that follows are counted over some seconds
without an event; the first row shows the cost of a process that is nearly idle. The limit: the bare client announces as
many bytes and another client receives them.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from bench.events.cold import BLOCK_TOKENS, EVENT_BLOCKS
from bench.events.load import EventLoad
from bench.events.plan import EventsPlan
from bench.events.run import Busy, Cpu, Meter, Stage

_WORKER = "w0"
_RING_BYTES = 1 << 20
_BARE_MESSAGES = 20_000
_HEARTBEAT_BYTES = 160
"""The approximate size of one heartbeat."""


class HeartbeatFigures(NamedTuple):
    """One cell."""

    ranks: int
    busy: Busy


class HeartbeatResults(NamedTuple):
    """All cells, and the CPU in us that a bare announcement costs its sender, the server and its receiver."""

    pulses: list[HeartbeatFigures]
    bare_us: Cpu


async def heartbeats(plan: EventsPlan, on_progress: Callable[[str], None]) -> HeartbeatResults:
    """Return all cells; `on_progress` gets the name of each before it is measured."""
    pulses = []
    for ranks in plan.heartbeat_ranks:
        on_progress(f"{ranks} ranks")
        pulses.append(await _measure(plan, ranks))
    on_progress("bare announcements")
    return HeartbeatResults(pulses, await _bare(_BARE_MESSAGES if plan.is_full else _BARE_MESSAGES // 10))


async def _measure(plan: EventsPlan, ranks: int) -> HeartbeatFigures:
    async with Stage() as stage:
        workers = [{"id": _WORKER, "dp_ranks": ranks, "ring_bytes": _RING_BYTES}]
        agent, index = await asyncio.gather(
            stage.child("events.agent", workers=workers, block_size=BLOCK_TOKENS), stage.child("events.index")
        )
        for dp_rank in range(ranks):
            load = EventLoad(dp_rank, plan.heartbeat_blocks, EVENT_BLOCKS, BLOCK_TOKENS)
            await agent.call("hold", worker=_WORKER, dp_rank=dp_rank, load=load._asdict())
        await index.call("proven", ranks=ranks)
        meter = await Meter.begin(stage, [agent], index)
        await asyncio.sleep(plan.heartbeat_s)
        return HeartbeatFigures(ranks, await meter.read())


async def _bare(messages: int) -> Cpu:
    async with Stage() as stage:
        sender, reader = await asyncio.gather(stage.child("events.bare"), stage.child("events.bare"))
        await reader.call("listen")
        before = await stage.cpu([sender], reader)
        await sender.call("announce", messages=messages, size=_HEARTBEAT_BYTES)
        await reader.call("lags", messages=messages)
        used = (await stage.cpu([sender], reader)).since(before)
        return used.over(messages / 1e6)
