"""Throughput: engine-event payloads, sent as fast as they are read, until an index has applied them; by event size.

One publisher, one rank. The bench counts a consolidator, a nats-server and an index, each a process; the publisher
prepares all payloads before. The limit: the bare client reads the resulting messages back and publishes them again,
with as many unconfirmed messages as a rank may have.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import NamedTuple

from bench.events.load import EventLoad
from bench.events.plan import EventsPlan
from bench.events.run import BenchFailed, Child, Cpu, Stage
from kv_protocol import subjects
from worker_agent.events.outbox import WINDOW_MESSAGES

BLOCK_TOKENS = 32
EVENTS_A_PAYLOAD = 8
_WORKER, _RANK = "w0", "w0/0"


class Throughput(NamedTuple):
    """One cell, medians of its rounds; CPU in s a million blocks. `bare` is only publishing the same messages."""

    event_blocks: int
    blocks_s: float
    messages: float
    message_bytes: float
    cpu: Cpu
    bare_blocks_s: float
    bare_cpu: Cpu
    rounds: int


class _Round(NamedTuple):
    blocks_s: float
    messages: float
    message_bytes: float
    cpu: Cpu
    bare_blocks_s: float
    bare_cpu: Cpu


async def throughput(plan: EventsPlan, on_progress: Callable[[str], None]) -> list[Throughput]:
    """Return all cells; `on_progress` gets the name of each before it is measured."""
    async with Stage() as stage:
        player = await stage.child("events.player", events_a_payload=EVENTS_A_PAYLOAD)
        endpoints = {each: player.started[each] for each in ("publisher", "replay")}
        worker = {"id": _WORKER, "dp_ranks": 1, "ring_bytes": 16 << 20}
        agent, index, bare = await asyncio.gather(
            stage.child("events.agent", workers=[worker], block_size=BLOCK_TOKENS, **endpoints),
            stage.child("events.index"),
            stage.child("events.bare"),
        )
        await player.call("subscribed")
        path, seeds, cells = _Path(plan, stage, player, agent, index, bare), count(), []
        for event_blocks, blocks in plan.throughput:
            on_progress(f"events of {event_blocks} blocks")
            loads = [EventLoad(next(seeds), blocks, event_blocks, BLOCK_TOKENS) for _ in range(plan.rounds)]
            cells.append(_median(event_blocks, [await path.measure(load) for load in loads]))
        return cells


def _median(event_blocks: int, rounds: list[_Round]) -> Throughput:
    return Throughput(
        event_blocks=event_blocks,
        blocks_s=median(each.blocks_s for each in rounds),
        messages=median(each.messages for each in rounds),
        message_bytes=median(each.message_bytes for each in rounds),
        cpu=Cpu(*(median(of_process) for of_process in zip(*(each.cpu for each in rounds), strict=True))),
        bare_blocks_s=median(each.bare_blocks_s for each in rounds),
        bare_cpu=Cpu(*(median(of_process) for of_process in zip(*(each.bare_cpu for each in rounds), strict=True))),
        rounds=len(rounds),
    )


@dataclass(frozen=True)
class _Path:
    """The processes of the event path, and the bare client."""

    plan: EventsPlan
    stage: Stage
    player: Child
    agent: Child
    index: Child
    bare: Child

    async def measure(self, load: EventLoad) -> _Round:
        """Return the figures of one load."""
        await self.player.call("prepare", load=load._asdict())
        stored = await self.stage.log.stream_state(subjects.EVENTS_STREAM)
        before = await self.stage.cpu([self.agent], self.index)
        seconds = await self._play()
        used = (await self.stage.cpu([self.agent], self.index)).since(before)
        now = await self.stage.log.stream_state(subjects.EVENTS_STREAM)
        copied = await self.bare.call("copy", after_seq=stored.last_seq, last_seq=now.last_seq)
        nats_s = self.stage.nats_cpu_s()
        bare = await self.bare.call("publish", window=WINDOW_MESSAGES, messages_min=self.plan.bare_messages_min)
        bare_cpu = Cpu(bare["cpu_ns"] / 1e9, self.stage.nats_cpu_s() - nats_s, 0.0)
        return _Round(
            blocks_s=load.blocks / seconds,
            messages=copied["messages"],
            message_bytes=copied["bytes"] / copied["messages"],
            cpu=used.over(load.blocks / 1e6),
            bare_blocks_s=bare["repetitions"] * load.blocks / bare["seconds"],
            bare_cpu=bare_cpu.over(bare["repetitions"] * load.blocks / 1e6),
        )

    async def _play(self) -> float:
        """Return the seconds from the first payload sent until the last block was applied."""
        played = await self.player.call("play")
        position = await self.agent.call("position", worker=_WORKER, sequence=played["sequence"])
        reached = await self.index.call("reach", rank=_RANK, epoch=position["epoch"], seq=position["last_seq"])
        if position["losses"]:
            raise BenchFailed(f"hop A lost {position['losses']} times, and was to be saturated, not overrun")
        return float((reached["applied_ns"] - played["began_ns"]) / 1e9)
