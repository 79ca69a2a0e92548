"""What the event bench measures: throughput, cold start and freshness.

Throughput: engine-event payloads, sent as fast as they are read, until an index has applied them; by event size.

One publisher, one rank. The bench counts a consolidator, a nats-server and an index, each a process; the publisher
prepares all payloads before. The limit: the bare client reads the resulting messages back and publishes them again,
with as many unconfirmed messages as a rank may have.

Cold start: an index in a new process, until it has caught up and until every rank is proven.

    the log      there is no snapshot: the index reads the whole log
    a snapshot   the index restores one and reads the log after it
    dumps        no snapshot, an empty log: the index requests a dump of every rank once it sees that it is behind

Time counts from before the process is started, with the interpreter and the imports. *Caught up* is what a router's
readiness waits for: the log that existed at the start was applied. *Proven*: a heartbeat at the position of each rank
found nothing wrong; heartbeats come once a second. The limits: the bare client reads the same messages, or the bytes of
the snapshot, and does nothing with them.

Freshness: how old a KV event is when an index in another process has applied it, while blocks flow.

scripted   `agents` agents; their engines together report a given number of blocks a second, from the engine's flush
fleet      a router, four workers with simulated engines, and requests; from when the agent made the payload
bare       what the log alone needs for as many messages of the same size: one client publishes, another follows
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from bench.child import Answer, BenchFailed, Child
from bench.demo.workload import Player, WorkloadShape, conversations
from bench.events.observed import BatchTimes, IndexRole, SourceRole, ages_s, spread
from bench.events.roles import AgentRole, BareRole, PlayerRole, SnapshotRole
from bench.events.run import FLUSH_S, OURS, EventLoad, EventsPlan, Stage
from bench.processes import FleetProcesses, FleetShape
from bench.tables import Rounds
from kv_protocol import subjects
from kv_runtime.clock import SystemClock
from worker_agent.events.outbox import WINDOW_MESSAGES

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


EVENTS_A_PAYLOAD = 8
_WORKER, _RANK = "w0", "w0/0"


async def throughput(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all cells; `on_progress` gets the name of each once it is measured. CPU is in s a million blocks."""
    async with Stage() as stage:
        player = await stage.child(PlayerRole, events_a_payload=EVENTS_A_PAYLOAD)
        publisher = player.started["publisher"]
        agent, index, bare = await asyncio.gather(
            stage.child(AgentRole, worker=_WORKER, dp_ranks=1, block_size=BLOCK_TOKENS, publisher=publisher),
            stage.child(IndexRole),
            stage.child(BareRole),
        )
        await player.call("subscribed")
        path, seeds = _Path(plan, stage, player, agent, index, bare), count()
        for event_blocks, blocks in plan.throughput:
            cell = f"throughput, events of {event_blocks} blocks"
            for _ in range(plan.rounds):
                load = EventLoad(next(seeds), blocks, event_blocks, BLOCK_TOKENS)
                results.add(OURS, cell, await path.measure(load))
            on_progress(cell)


class _Path(NamedTuple):
    """The processes of the event path, and the bare client."""

    plan: EventsPlan
    stage: Stage
    player: Child
    agent: Child
    indexer: Child
    bare: Child

    async def measure(self, load: EventLoad) -> dict[str, float]:
        """Return the figures of one load."""
        await self.player.call("prepare", load=load._asdict())
        stored = await self.stage.log.stream_state(subjects.EVENTS_STREAM)
        before = await self._cpu()
        seconds = await self._play()
        after = await self._cpu()
        now = await self.stage.log.stream_state(subjects.EVENTS_STREAM)
        copied = await self.bare.call("copy", after_seq=stored.last_seq, last_seq=now.last_seq)
        bare = await self.bare.call("publish", window=WINDOW_MESSAGES, messages_min=self.plan.bare_messages_min)
        return {
            "blocks/s": load.blocks / seconds,
            "messages": copied["messages"],
            "bytes each": copied["bytes"] / copied["messages"],
            **{f"{name} CPU": (after[name] - before[name]) / load.blocks * 1e6 for name in before},
            "bare blocks/s": bare["repetitions"] * load.blocks / bare["seconds"],
        }

    async def _cpu(self) -> dict[str, float]:
        agent, index = [(await each.call("cpu"))["cpu_ns"] / 1e9 for each in (self.agent, self.indexer)]
        return {"agent": agent, "nats-server": self.stage.nats_cpu_s(), "index": index}

    async def _play(self) -> float:
        """Return the seconds from the first payload sent until the last block was applied."""
        played = await self.player.call("play")
        position = await self.agent.call("position", sequence=played["sequence"])
        reached = await self.indexer.call("reach", rank=_RANK, epoch=position["epoch"], seq=position["last_seq"])
        if position["losses"]:
            raise BenchFailed(f"hop A lost {position['losses']} times, and was to be saturated, not overrun")
        return float((reached["applied_ns"] - played["began_ns"]) / 1e9)


_COLD_BLOCK_TOKENS = 16
_COLD_EVENT_BLOCKS = 64


async def cold(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all ways to start; `on_progress` gets the name of each once it is measured."""
    async with Stage() as stage:
        agent = await stage.child(AgentRole, worker=_WORKER, dp_ranks=plan.ranks, block_size=_COLD_BLOCK_TOKENS)
        bench = _ColdBench(plan, results, stage, agent, await stage.child(BareRole), on_progress)
        await bench.hold(0, plan.rank_blocks)
        await bench.from_log()
        await bench.hold(plan.ranks, plan.tail_blocks)
        await bench.from_snapshot()
        await bench.from_dumps()


class _ColdBench(NamedTuple):
    """The processes that run throughout; each new index is a new process."""

    plan: EventsPlan
    results: Rounds
    stage: Stage
    agent: Child
    bare: Child
    on_progress: Callable[[str], None]

    async def hold(self, seed: int, blocks: int) -> None:
        """Let each rank hold so many more blocks, each rank with its own seed; their events are in the log."""
        for dp_rank in range(self.plan.ranks):
            load = EventLoad(seed + dp_rank, blocks, _COLD_EVENT_BLOCKS, _COLD_BLOCK_TOKENS)
            await self.agent.call("hold", dp_rank=dp_rank, load=load._asdict())

    async def from_log(self) -> None:
        """Start without a snapshot, and write one afterwards."""
        last_seq = (await self.stage.log.stream_state(subjects.EVENTS_STREAM)).last_seq
        read = await self.bare.call("copy", after_seq=0, last_seq=last_seq)
        await self._start("the log", self.plan.rank_blocks, read)
        keeper = await self.stage.child(SnapshotRole)
        await keeper.call("write")
        await keeper.close()

    async def from_snapshot(self) -> None:
        """Start with the snapshot, and the log behind it."""
        read = await self.bare.call("get", bucket=subjects.SNAPSHOT_BUCKET)
        await self._start("a snapshot", self.plan.rank_blocks + self.plan.tail_blocks, read)

    async def from_dumps(self) -> None:
        """Delete the log and the snapshots before the start."""
        bucket = self.stage.log.objects(subjects.SNAPSHOT_BUCKET)
        for name in await bucket.names():
            await bucket.delete(name)
        last_seq = (await self.stage.log.stream_state(subjects.EVENTS_STREAM)).last_seq
        await self.stage.log.purge(subjects.EVENTS_STREAM, last_seq)
        await self._start("dumps", self.plan.rank_blocks + self.plan.tail_blocks, {})

    async def _start(self, name: str, rank_blocks: int, read: Answer) -> None:
        cell, limit = f"cold start, from {name}", {"bytes": read["bytes"], "reading s": read["seconds"]} if read else {}
        for _ in range(self.plan.rounds):
            self.results.add(OURS, cell, limit | await self._begin(self.plan.ranks * rank_blocks))
        self.on_progress(cell)

    async def _begin(self, blocks: int) -> dict[str, float]:
        index = await self.stage.child(IndexRole)
        proven = await index.call("proven", ranks=self.plan.ranks)
        await index.close()
        if proven["held_blocks"] != blocks:
            raise BenchFailed(f"the index holds {proven['held_blocks']} blocks, and not {blocks}")
        moments = {"caught up s": proven["caught_up_ns"], "all proven s": proven["proven_ns"]}
        return {"blocks": blocks} | {name: (each - index.spawned_ns) / 1e9 for name, each in moments.items()}
