"""Freshness: how old a KV event is when an index in another process has applied it, while blocks flow.

scripted   `agents` agents; their engines together report a given number of blocks a second, from the engine's flush
fleet      a router, four workers with simulated engines, and requests; from when the agent made the payload
bare       what the log alone needs for as many messages of the same size: one client publishes, another follows
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.child import Answer, BenchFailed, Child
from bench.demo.workload import Player, WorkloadShape, conversations
from bench.events.load import FLUSH_S, EventLoad
from bench.events.observed import BatchTimes, IndexRole, SourceRole, ages_s, spread
from bench.events.roles import BareRole
from bench.events.run import OURS, EventsPlan, Stage
from bench.processes import FleetProcesses, FleetShape
from bench.tables import Rounds
from kv_runtime.clock import SystemClock

BLOCK_TOKENS = 32
EVENT_BLOCKS = 8
_BEGIN_S = 0.3
_SEED = 1
_FLEET_WORKERS = 4
_SETTINGS = (f"engine.block_size={BLOCK_TOKENS}", "telemetry.log_level=warning")
_REQUESTS = WorkloadShape(conversations=32, turns=4, think_s=0.5, arrival_s=0.15)


class _Seen(NamedTuple):
    """What an index applied, and the seconds from the start until it applied the last batch."""

    seconds: float
    batches: list[BatchTimes]
    messages: int
    message_bytes: float


async def freshness(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all cells; `on_progress` gets the name of each once it is measured."""
    for blocks_s in plan.rates_blocks_s:
        await _scripted(plan, results, cell := f"freshness, {blocks_s:,} blocks/s", blocks_s)
        on_progress(cell)
    if plan.has_fleet:
        await _fleet(plan, results, cell := f"freshness, {_FLEET_WORKERS} workers, requests")
        on_progress(cell)


async def _scripted(plan: EventsPlan, results: Rounds, cell: str, blocks_s: int) -> None:
    """Measure the ages of batches at one rate of all engines together."""
    rate, seconds = blocks_s / plan.agents, plan.warming_s + plan.flowing_s
    loads = [EventLoad(number, round(rate * seconds), EVENT_BLOCKS, BLOCK_TOKENS) for number in range(plan.agents)]
    async with Stage() as stage:
        index, *agents = await asyncio.gather(
            stage.child(IndexRole),
            *(stage.child(SourceRole, worker=f"w{load.seed}", load=load._asdict(), blocks_s=rate) for load in loads),
        )
        await index.call("watch")
        begins_ns = time.time_ns() + round(_BEGIN_S * 1e9)
        played = await _flow(agents, index, begins_ns)
        seen = await _seen(index, begins_ns)
        bare = await _bare_lag(stage, seen, plan.flowing_s)
    warm_ns = begins_ns + round(plan.warming_s * 1e9)
    flushed_ns = {each["rank"]: each["flushed_ns"] for each in played}
    results.add(OURS, cell, _figures(seen, ages_s(seen.batches, flushed_ns, warm_ns), bare))


async def _flow(agents: Sequence[Child], index: Child, begins_ns: int) -> list[Answer]:
    """Let the agents send from `begins_ns` on, with staggered flushes; return what they sent once all was applied."""
    apart_ns = FLUSH_S * 1e9 / len(agents)
    for number, agent in enumerate(agents):
        await agent.call("play", begins_ns=begins_ns + round(number * apart_ns))
    played = await asyncio.gather(*(agent.call("played") for agent in agents))
    for each in played:
        await index.call("reach", rank=each["rank"], epoch=each["epoch"], seq=each["last_seq"])
    return played


async def _fleet(plan: EventsPlan, results: Rounds, cell: str) -> None:
    """Measure the ages of batches while a router and four workers answer requests."""
    async with FleetProcesses(FleetShape(_FLEET_WORKERS, worker_settings=_SETTINGS)) as running:
        index = await Child.start(IndexRole, {"url": running.nats_url})
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
        results.add(OURS, cell, _figures(seen, ages_s(seen.batches, {}), await _bare_lag(stage, seen, plan.flowing_s)))


async def _seen(index: Child, begins_ns: int) -> _Seen:
    recorded = await index.call("recorded")
    batches = [BatchTimes(*row) for row in recorded["rows"]]
    seconds = (max(batch.applied_ns for batch in batches) - begins_ns) / 1e9
    return _Seen(seconds, batches, recorded["messages"], recorded["bytes"] / recorded["messages"])


async def _bare_lag(stage: Stage, seen: _Seen, seconds: float) -> list[float]:
    """Return the delays in seconds of confirmed messages like those seen, from one client to another."""
    sender, reader = await asyncio.gather(stage.child(BareRole), stage.child(BareRole))
    await reader.call("follow")
    messages_s = seen.messages / seen.seconds
    messages = max(1, round(messages_s * seconds))
    await sender.call("send", messages=messages, size=round(seen.message_bytes), every_s=1 / messages_s)
    lags_s: list[float] = (await reader.call("lags", messages=messages))["lags_s"]
    return lags_s


def _figures(seen: _Seen, ages: Sequence[float], bare_s: Sequence[float]) -> dict[str, float]:
    return {
        "blocks/s": sum(batch.blocks for batch in seen.batches) / seen.seconds,
        "messages/s": seen.messages / seen.seconds,
        "bytes each": seen.message_bytes,
        **spread(ages),
        **{f"bare {name}": each for name, each in spread(bare_s).items()},
    }
