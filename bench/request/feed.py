"""The CPU time that KV events cost a router: a worker publishes at a known rate, through its agent's event path."""

import asyncio
import time

from bench.dataplane.systems import RunningSystem, on_core
from bench.events.load import EventLoad
from bench.events.run import Child
from bench.request.results import EventsUse

_EVENT_BLOCKS, _BLOCK_TOKENS = 8, 64
_BEGIN_S = 0.5


async def events_use(running: RunningSystem, seconds: float, blocks_s: int, core: int) -> EventsUse:
    """Return the CPU of the router by event batch, less that of as long without events; the agent runs on `core`."""
    assert running.process is not None
    url = (await running.process.line_with("event log")).split()[2]
    load = EventLoad(1, round(blocks_s * seconds), _EVENT_BLOCKS, _BLOCK_TOKENS)
    arguments = {"url": url, "worker": "publishing", "load": load._asdict(), "blocks_s": blocks_s, "collects": True}
    with on_core(core):
        source = await Child.start("events.source", arguments)
    try:
        await asyncio.sleep(_BEGIN_S)
        before_s, began_s = running.used().cpu_s, time.perf_counter()
        await asyncio.sleep(seconds)
        idle = (running.used().cpu_s - before_s) / (time.perf_counter() - began_s)
        before_s, began_s = running.used().cpu_s, time.perf_counter()
        await source.call("play", begins_ns=time.time_ns())
        played = await source.call("played")
        used_s, took_s = running.used().cpu_s - before_s, time.perf_counter() - began_s
    finally:
        await source.close()
    return use_of(used_s, took_s, idle, load.blocks, played["last_seq"], len(played["handed_ns"]))


def use_of(used_s: float, took_s: float, idle: float, blocks: int, batches: int, messages: int) -> EventsUse:
    """Return the use by batch and by message; `idle` is the CPU seconds of a second without events."""
    more_us = 1e6 * (used_s - idle * took_s)
    rates = (batches / took_s, blocks / took_s, messages / took_s)
    return EventsUse(*rates, more_us / batches, more_us / messages, 1e3 * idle)
