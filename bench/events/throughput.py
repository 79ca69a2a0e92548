"""What the event bench measures: throughput, cold start and freshness.

Throughput: how fast an index applies engine-event payloads that are sent as fast as they are read; by event size.

There is one publisher with one rank, which prepares all payloads before. A consolidator, a nats-server and an index are
measured, each a process. The limit is what the bare client reaches: it reads the resulting messages back and publishes
them again, with as many unconfirmed messages as a rank may have.

Cold start: how long an index in a new process takes to catch up, and until every rank is proven.

    the log      there is no snapshot: the index reads the whole log
    a snapshot   the index restores one and reads the log after it
    dumps        no snapshot, an empty log: the index requests a dump of every rank once it sees that it is behind

Time counts from before the process is started, so the interpreter and the imports count. *Caught up* is what a router's
readiness waits for: the log that existed at the start was applied. *Proven*: a heartbeat at the position of each rank
found nothing wrong; heartbeats come once a second. The limits: the bare client reads the same messages, or the bytes of
the snapshot, and does nothing with them.

Freshness: how old a KV event is when an index in another process has applied it, while blocks flow.

scripted   `agents` agents, whose publishers together send a given number of blocks a second; age since engine's flush
fleet      a router, four workers with simulated engines, and requests; age since the agent made the payload
bare       what the log alone needs for as many messages of the same size: one client publishes, another follows
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from bench.child import Answer, BenchFailed, Child
from bench.demo.workload import Player, WorkloadShape, conversations
from bench.events.observed import BatchTimes, IndexRole, ages_s, spread
from bench.events.roles import AgentRole, BareRole, PlayerRole, SnapshotRole
from bench.events.run import FLUSH_S, OURS, EventLoad, EventsPlan, Stage
from bench.processes import FleetProcesses, FleetShape
from bench.tables import Rounds
from kv_protocol import subjects
from kv_runtime.clock import Clock
from worker_agent.events.outbox import Outbox

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
        index, *players = await asyncio.gather(stage.child(IndexRole), *(stage.child(PlayerRole) for _ in loads))
        agents = [await _agent(stage, f"w{number}", player) for number, player in enumerate(players)]
        for player, load in zip(players, loads, strict=True):
            await player.call("prepare", load=load._asdict(), blocks_s=rate)
        await index.call("watch")
        begins_ns = time.time_ns() + round(_BEGIN_S * 1e9)
        apart_ns = FLUSH_S * 1e9 / len(players)  # flushes are staggered
        played = await asyncio.gather(
            *(each.call("play", begins_ns=begins_ns + round(at * apart_ns)) for at, each in enumerate(players))
        )
        for number, (agent, each) in enumerate(zip(agents, played, strict=True)):
            await _reached(agent, index, f"w{number}/0", each["sequence"])
        seen = await _seen(index, begins_ns)
        bare = await _bare_lag(stage, seen, plan.flowing_s)
    flushed_ns = {f"w{number}/0": each["flushed_ns"] for number, each in enumerate(played)}
    warm_ns = begins_ns + round(plan.warming_s * 1e9)
    results.add(OURS, cell, _figures(seen, ages_s(seen.batches, flushed_ns, warm_ns), bare))


async def _agent(stage: Stage, worker: str, player: Child) -> Child:
    """Return an agent of one rank that reads the player's publications."""
    publisher = player.started["publisher"]
    agent = await stage.child(AgentRole, worker=worker, dp_ranks=1, block_size=BLOCK_TOKENS, publisher=publisher)
    await player.call("subscribed")
    return agent


async def _reached(agent: Child, index: Child, rank: str, sequence: int) -> int:
    """Return the time in ns at which the index has applied all that the agent read before `sequence`."""
    position = await agent.call("position", sequence=sequence)
    if position["losses"]:
        raise BenchFailed(f"hop A lost {position['losses']} times, and was to be saturated, not overrun")
    reached = await index.call("reach", rank=rank, epoch=position["epoch"], seq=position["last_seq"])
    return int(reached["applied_ns"])


async def _fleet(plan: EventsPlan, results: Rounds, cell: str) -> None:
    """Measure the ages of batches while a router and four workers answer requests."""
    async with FleetProcesses(FleetShape(_FLEET_WORKERS, worker_settings=_SETTINGS)) as running:
        index = await Child.start(IndexRole, {"url": running.nats_url})
        try:
            await index.call("watch")
            begins_ns = time.time_ns()
            player = Player(running.data_url, FleetShape().model, Clock())
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


_WORKER, _RANK = "w0", "w0/0"


async def throughput(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all cells; `on_progress` gets the name of each once it is measured. CPU is in s a million blocks."""
    async with Stage() as stage:
        player, index, bare = await asyncio.gather(*(stage.child(each) for each in (PlayerRole, IndexRole, BareRole)))
        agent = await _agent(stage, _WORKER, player)

        async def used_s() -> dict[str, float]:
            """Return the CPU seconds of each process so far."""
            of_agent, of_index = [(await each.call("cpu"))["cpu_ns"] / 1e9 for each in (agent, index)]
            return {"agent": of_agent, "nats-server": stage.nats_cpu_s(), "index": of_index}

        async def play() -> float:
            """Return the seconds from the first payload sent until the last block was applied."""
            played = await player.call("play")
            return (await _reached(agent, index, _RANK, played["sequence"]) - int(played["began_ns"])) / 1e9

        async def measured(load: EventLoad) -> dict[str, float]:
            await player.call("prepare", load=load._asdict())
            stored = await stage.log.stream_state(subjects.EVENTS_STREAM)
            before, seconds, after = await used_s(), await play(), await used_s()
            now = await stage.log.stream_state(subjects.EVENTS_STREAM)
            copied = await bare.call("copy", after_seq=stored.last_seq, last_seq=now.last_seq)
            published = await bare.call("publish", window=Outbox.window, messages_min=plan.bare_messages_min)
            return {
                "blocks/s": load.blocks / seconds,
                "messages": copied["messages"],
                "bytes each": copied["bytes"] / copied["messages"],
                **{f"{name} CPU": (after[name] - before[name]) / load.blocks * 1e6 for name in before},
                "bare blocks/s": published["repetitions"] * load.blocks / published["seconds"],
            }

        seeds = count()
        for event_blocks, blocks in plan.throughput:
            cell = f"throughput, events of {event_blocks} blocks"
            for _ in range(plan.rounds):
                load = EventLoad(next(seeds), blocks, event_blocks, BLOCK_TOKENS)
                results.add(OURS, cell, await measured(load))
            on_progress(cell)


_COLD_BLOCK_TOKENS = 16
_COLD_EVENT_BLOCKS = 64


async def cold(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all ways to start; `on_progress` gets the name of each once it is measured.

    Each start is a new process; the log, the agent and the bare client stay.
    """
    async with Stage() as stage:
        agent = await stage.child(AgentRole, worker=_WORKER, dp_ranks=plan.ranks, block_size=_COLD_BLOCK_TOKENS)
        bare, log = await stage.child(BareRole), stage.log

        async def hold(seed: int, blocks: int) -> None:
            """Let each rank hold this many more blocks, each rank with its own seed; return once the log has them."""
            for dp_rank in range(plan.ranks):
                load = EventLoad(seed + dp_rank, blocks, _COLD_EVENT_BLOCKS, _COLD_BLOCK_TOKENS)
                await agent.call("hold", dp_rank=dp_rank, load=load._asdict())

        async def start(name: str, rank_blocks: int, read: Answer) -> None:
            """Start indexes; `read` is how long the bare client took to read the same data."""
            cell, blocks = f"cold start, from {name}", plan.ranks * rank_blocks
            limit = {"bytes": read["bytes"], "reading s": read["seconds"]} if read else {}
            for _ in range(plan.rounds):
                index = await stage.child(IndexRole)
                proven = await index.call("proven", ranks=plan.ranks)
                await index.close()
                if proven["held_blocks"] != blocks:
                    raise BenchFailed(f"the index holds {proven['held_blocks']} blocks, and not {blocks}")
                moments = {"caught up s": proven["caught_up_ns"], "all proven s": proven["proven_ns"]}
                took_s = {name: (each - index.spawned_ns) / 1e9 for name, each in moments.items()}
                results.add(OURS, cell, {**limit, "blocks": blocks, **took_s})
            on_progress(cell)

        async def last_seq() -> int:
            return (await log.stream_state(subjects.EVENTS_STREAM)).last_seq

        await hold(0, plan.rank_blocks)
        await start("the log", plan.rank_blocks, await bare.call("copy", after_seq=0, last_seq=await last_seq()))
        keeper = await stage.child(SnapshotRole)
        await keeper.call("written")
        await keeper.close()
        await hold(plan.ranks, plan.tail_blocks)
        held_blocks = plan.rank_blocks + plan.tail_blocks
        await start("a snapshot", held_blocks, await bare.call("get", bucket=subjects.SNAPSHOT_BUCKET))
        bucket = log.objects(subjects.SNAPSHOT_BUCKET)
        for name in await bucket.names():
            await bucket.delete(name)
        await log.purge(subjects.EVENTS_STREAM, await last_seq())
        await start("dumps", held_blocks, {})
