"""Recovery: from the moment at which the index detects an error to the one at which it is current again.

    batches lost    the rank's messages do not reach the index until so many batches were published; the next one
                    does and shows the gap. The index requests the tail, which the rank's ring still has
    a block wrong   one hash of a message is changed; the next heartbeat shows it. The index requests the buckets
    all wrong       a batch is lost, and the rank's ring is empty. The index requests the tail and gets all blocks

Detection takes as long as the stream is silent, at most a heartbeat (1 s): that is not in the figures. Bytes are those
of requests and responses, without the log's own framing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bench.events.cold import BLOCK_TOKENS, EVENT_BLOCKS
from bench.events.load import EventLoad
from bench.events.plan import EventsPlan
from bench.events.run import BenchFailed, Child, Stage
from worker_agent.events.recoveries import CHUNK_BLOCKS, KINDS

_RINGED, _RINGLESS = "ringed", "ringless"
_RING_BYTES = 64 << 20
_CHUNK_BYTES = 17 * CHUNK_BLOCKS


class Recovery(NamedTuple):
    """One kind of damage; seconds are the median of all rounds, the bytes those of the last.

    `bare_s` is the time that as many bytes take from one bare client to another.
    """

    name: str
    healed_by: str
    seconds: float
    worst_s: float
    asked_bytes: int
    answered_bytes: int
    bare_s: float
    rounds: int


async def recovery(plan: EventsPlan, on_progress: Callable[[str], None]) -> list[Recovery]:
    """Return all kinds of damage; `on_progress` gets the name of each before it is done."""
    async with Stage() as stage:
        on_progress("blocks are being held")
        workers = [
            {"id": _RINGED, "dp_ranks": 1, "ring_bytes": _RING_BYTES},
            {"id": _RINGLESS, "dp_ranks": 1, "ring_bytes": 0},
        ]
        agent, index, bare, listening = await asyncio.gather(
            stage.child("events.agent", workers=workers, block_size=BLOCK_TOKENS),
            stage.child("events.index"),
            stage.child("events.bare"),
            stage.child("events.bare"),
        )
        await listening.call("listen")
        bench = _RecoveryBench(plan, agent, index)
        for worker in (_RINGED, _RINGLESS):
            await bench.hold(worker, plan.rank_blocks, EVENT_BLOCKS)
        await index.call("proven", ranks=len(workers))
        healed = []
        for name, damage in bench.damages():
            on_progress(name)
            rounds = [await damage() for _ in range(plan.rounds)]
            healed.append(_summed(name, rounds, await _bare_s(bare, listening, rounds[-1]["answered_bytes"])))
        return healed


async def _bare_s(bare: Child, listening: Child, size: int) -> float:
    """Return how long so many bytes take, in messages of the size of a dump's."""
    messages = -(-size // _CHUNK_BYTES)
    await bare.call("announce", messages=messages, size=min(size, _CHUNK_BYTES))
    return float((await listening.call("lags", messages=messages))["took_s"])


def _summed(name: str, rounds: list[dict[str, Any]], bare_s: float) -> Recovery:
    kinds = {each["healed_by"] for each in rounds}
    seconds, last = [each["seconds"] for each in rounds], rounds[-1]
    return Recovery(
        name=name,
        healed_by=", ".join(sorted(kinds)),
        seconds=median(seconds),
        worst_s=max(seconds),
        asked_bytes=last["asked_bytes"],
        answered_bytes=last["answered_bytes"],
        bare_s=bare_s,
        rounds=len(rounds),
    )


class _RecoveryBench:
    """Two ranks that the index follows; one of them keeps nothing for replays."""

    def __init__(self, plan: EventsPlan, agent: Child, index: Child) -> None:
        self._plan, self._agent, self._index = plan, agent, index
        self._seed = 0
        self._answers = dict.fromkeys((_RINGED, _RINGLESS), dict.fromkeys(KINDS, 0))

    def damages(self) -> list[tuple[str, Callable[[], Awaitable[dict[str, Any]]]]]:
        """Return the name of each kind of damage and the function that does it."""
        of = f"of {self._plan.rank_blocks:,} blocks"
        return [
            *((f"{lost:,} batches lost", partial(self._lose, _RINGED, lost)) for lost in self._plan.lost_batches),
            (f"1 block wrong {of}", self._damage),
            (f"a batch lost, none kept, {of}", partial(self._lose, _RINGLESS, 1)),
        ]

    async def hold(self, worker: str, blocks: int, event_blocks: int) -> dict[str, Any]:
        """Let the worker hold so many more blocks and publish their events; return its position."""
        self._seed += 1
        load = EventLoad(self._seed, blocks, event_blocks, BLOCK_TOKENS)
        return await self._agent.call("hold", worker=worker, dp_rank=0, load=load._asdict())

    async def _lose(self, worker: str, batches: int) -> dict[str, Any]:
        await self._index.call("lose", rank=f"{worker}/0")
        position = await self.hold(worker, batches * self._plan.batch_blocks, self._plan.batch_blocks)
        await self._index.call("lost", seq=position["last_seq"])
        await self.hold(worker, self._plan.batch_blocks, self._plan.batch_blocks)
        return await self._recovered(worker)

    async def _damage(self) -> dict[str, Any]:
        await self._index.call("damage", rank=f"{_RINGED}/0")
        await self.hold(_RINGED, self._plan.batch_blocks, self._plan.batch_blocks)
        return await self._recovered(_RINGED)

    async def _recovered(self, worker: str) -> dict[str, Any]:
        recovered = await self._index.call("recovered", rank=f"{worker}/0")
        before, self._answers[worker] = self._answers[worker], recovered["answers"]
        by = [kind for kind in KINDS if recovered["answers"][kind] > before[kind]]
        if len(by) != 1:
            raise BenchFailed(f"healed by {by or 'nothing'}, and not by one answer")
        return recovered | {"healed_by": by[0]}
