"""Throughput: engine-event payloads, sent as fast as they are read, until an index has applied them; by event size.

One publisher, one rank. The bench counts a consolidator, a nats-server and an index, each a process; the publisher
prepares all payloads before. The limit: the bare client reads the resulting messages back and publishes them again,
with as many unconfirmed messages as a rank may have.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from bench.child import BenchFailed, Child
from bench.events.load import EventLoad
from bench.events.observed import IndexRole
from bench.events.roles import AgentRole, BareRole, PlayerRole
from bench.events.run import OURS, EventsPlan, Stage
from bench.tables import Rounds
from kv_protocol import subjects
from worker_agent.events.outbox import WINDOW_MESSAGES

BLOCK_TOKENS = 32
EVENTS_A_PAYLOAD = 8
_WORKER, _RANK = "w0", "w0/0"


async def throughput(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all cells; `on_progress` gets the name of each once it is measured. CPU is in s a million blocks."""
    async with Stage() as stage:
        player = await stage.child(PlayerRole, events_a_payload=EVENTS_A_PAYLOAD)
        endpoints = {each: player.started[each] for each in ("publisher", "replay")}
        agent, index, bare = await asyncio.gather(
            stage.child(AgentRole, worker=_WORKER, dp_ranks=1, block_size=BLOCK_TOKENS, **endpoints),
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
