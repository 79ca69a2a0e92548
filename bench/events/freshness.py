"""Freshness: how old a KV event is when an index in another process has applied it, while blocks flow.

scripted   `agents` agents; their engines together report a given number of blocks a second, from the engine's flush.
           Repeated with agents that do not collect garbage, which shows the share of the collector
fleet      a router, four workers with simulated engines, and requests; from when the agent made the payload
bare       what the log alone needs for as many messages of the same size: one client publishes, another follows
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from bench.demo.replay import Player
from bench.demo.workload import WorkloadShape, conversations
from bench.events.load import FLUSH_S, EventLoad
from bench.events.plan import EventsPlan
from bench.events.run import Answer, BenchFailed, Busy, Child, Meter, Stage
from bench.events.stages import Age, BatchTimes, SentBatches, Spread, ages, medians_ms, spread
from bench.processes import FleetProcesses, FleetShape
from kv_runtime.clock import SystemClock

BLOCK_TOKENS = 32
EVENT_BLOCKS = 8
_BEGIN_S = 0.3
_SEED = 1
_FLEET_WORKERS = 4
_SETTINGS = (f"engine.block_size={BLOCK_TOKENS}", "telemetry.log_level=warning")
_REQUESTS = WorkloadShape(conversations=32, turns=4, think_s=0.5, arrival_s=0.15)


class Freshness(NamedTuple):
    """One cell. The CPU use of a fleet is not measured."""

    name: str
    blocks_s: float
    batches_s: float
    messages_s: float
    message_bytes: float
    age: Spread
    stages_ms: dict[str, float]
    bare: Spread
    is_ours: bool = True
    """Whether targets apply: the processes run as in production."""
    busy: Busy | None = None
    longest_gc_ms: float | None = None
    """The longest time that garbage collection stopped an agent."""


class _Seen(NamedTuple):
    """What an index applied, and the seconds from the start until it applied the last batch."""

    seconds: float
    batches: list[BatchTimes]
    messages: int
    message_bytes: float


async def freshness(plan: EventsPlan, on_progress: Callable[[str], None]) -> list[Freshness]:
    """Return all cells; `on_progress` gets the name of each before it is measured."""
    cells = []
    for blocks_s in plan.rates_blocks_s:
        on_progress(f"{blocks_s:,} blocks/s")
        cells.append(await scripted(plan, blocks_s))
    for blocks_s in plan.uncollected_rates_blocks_s:
        on_progress(f"{blocks_s:,} blocks/s, no garbage collection")
        cells.append(await scripted(plan, blocks_s, collects=False))
    if plan.has_fleet:
        on_progress("requests")
        cells.append(await fleet(plan))
    return cells


async def scripted(plan: EventsPlan, blocks_s: int, *, collects: bool = True) -> Freshness:
    """Return the ages of batches at one rate of all engines together; agents collect garbage, or do not."""
    seconds = plan.warming_s + plan.flowing_s
    loads = [
        EventLoad(number, round(blocks_s / plan.agents * seconds), EVENT_BLOCKS, BLOCK_TOKENS)
        for number in range(plan.agents)
    ]
    async with Stage() as stage:
        index, *agents = await asyncio.gather(
            stage.child("events.index"),
            *(_source(stage, load, blocks_s / plan.agents, collects=collects) for load in loads),
        )
        await index.call("watch")
        begins_ns = time.time_ns() + round(_BEGIN_S * 1e9)
        meter = await Meter.begin(stage, agents, index)
        played = await _flow(agents, index, begins_ns)
        busy = await meter.read()
        seen = await _seen(index, begins_ns)
        bare = await bare_lag(stage, seen.messages / seen.seconds, round(seen.message_bytes), plan.flowing_s)
    warm_ns = begins_ns + round(plan.warming_s * 1e9)
    sent = {each["rank"]: SentBatches(each["flushed_ns"], each["handed_ns"]) for each in played}
    of = [age for age in ages(seen.batches, sent) if age.flushed_ns >= warm_ns]
    name = f"{blocks_s:,} blocks/s{'' if collects else ', no GC'}"
    longest_gc_ms = 1e3 * max(each["longest_gc_s"] for each in played)
    return _cell(name, seen, of, bare)._replace(is_ours=collects, busy=busy, longest_gc_ms=longest_gc_ms)


def _source(stage: Stage, load: EventLoad, blocks_s: float, *, collects: bool) -> Awaitable[Child]:
    arguments = {"worker": f"w{load.seed}", "load": load._asdict(), "blocks_s": blocks_s, "collects": collects}
    return stage.child("events.source", **arguments)


async def _flow(agents: Sequence[Child], index: Child, begins_ns: int) -> list[Answer]:
    """Let the agents send from `begins_ns` on, with staggered flushes; return what they sent once all was applied."""
    apart_ns = FLUSH_S * 1e9 / len(agents)
    for number, agent in enumerate(agents):
        await agent.call("play", begins_ns=begins_ns + round(number * apart_ns))
    played = await asyncio.gather(*(agent.call("played") for agent in agents))
    for each in played:
        await index.call("reach", rank=each["rank"], epoch=each["epoch"], seq=each["last_seq"])
    return played


async def fleet(plan: EventsPlan) -> Freshness:
    """Return the ages of batches while a router and four workers answer requests."""
    async with FleetProcesses(FleetShape(_FLEET_WORKERS, worker_settings=_SETTINGS)) as running:
        index = await Child.start("events.index", {"url": running.nats_url})
        try:
            await index.call("watch")
            begins_ns = time.time_ns()
            player = Player(running.data_url, FleetShape().model, SystemClock())
            played = await player.play(list(conversations(_REQUESTS, _SEED)), _REQUESTS.answer_tokens)
            if failed := [request.error for request in played if request.error]:
                raise BenchFailed(f"{len(failed)} of {len(played)} requests failed, the first: {failed[0]}")
            seen = await _seen(index, begins_ns)
        finally:
            await index.close()
    async with Stage() as stage:
        bare = await bare_lag(stage, seen.messages / seen.seconds, round(seen.message_bytes), plan.flowing_s)
    return _cell("4 workers, requests", seen, ages(seen.batches, {}), bare)


async def _seen(index: Child, begins_ns: int) -> _Seen:
    recorded = await index.call("recorded")
    batches = [BatchTimes(*row) for row in recorded["rows"]]
    seconds = (max(batch.applied_ns for batch in batches) - begins_ns) / 1e9
    return _Seen(seconds, batches, recorded["messages"], recorded["bytes"] / recorded["messages"])


async def bare_lag(stage: Stage, messages_s: float, size: int, seconds: float) -> Spread:
    """Return the delay of confirmed messages from one client to another."""
    sender, reader = await asyncio.gather(stage.child("events.bare"), stage.child("events.bare"))
    await reader.call("follow")
    messages = max(1, round(messages_s * seconds))
    await sender.call("send", messages=messages, size=size, every_s=1 / messages_s)
    return spread((await reader.call("lags", messages=messages))["lags_s"])


def _cell(name: str, seen: _Seen, of: Sequence[Age], bare: Spread) -> Freshness:
    return Freshness(
        name=name,
        blocks_s=sum(batch.blocks for batch in seen.batches) / seen.seconds,
        batches_s=len(seen.batches) / seen.seconds,
        messages_s=seen.messages / seen.seconds,
        message_bytes=seen.message_bytes,
        age=spread([age.total_s for age in of]),
        stages_ms=medians_ms(of),
        bare=bare,
    )
