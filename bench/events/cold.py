"""Cold start: an index in a new process, until it has caught up and until every rank is proven; and snapshots.

    log        there is no snapshot: the index reads the whole log
    snapshot   the index restores one and reads the log after it
    dumps      no snapshot, an empty log: the index requests a dump of every rank once it sees that it is behind

Time counts from before the process is started, with the interpreter and the imports. *Caught up* is what a router's
readiness waits for: the log that existed at the start was applied. *Proven*: a heartbeat at the position of each rank
found nothing wrong; heartbeats come once a second. The limits: the bare client reads the same messages, or the bytes of
the snapshot, and does nothing with them.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from bench.events.load import EventLoad
from bench.events.plan import EventsPlan
from bench.events.run import BenchFailed, Child, Stage
from kv_protocol import subjects

BLOCK_TOKENS = 16
EVENT_BLOCKS = 64
_WORKER = "w0"
_RING_BYTES = 16 << 20


class StartTimes(NamedTuple):
    """One way to start; medians of all rounds, in seconds. `limit_s` is the time to only read the bytes."""

    name: str
    blocks: int
    bytes: int
    connected_s: float
    caught_up_s: float
    proven_s: float
    limit_s: float | None
    rounds: int


class SnapshotCost(NamedTuple):
    """The time to write one, in seconds; `blocked_s` is the longest time that it blocked the event loop."""

    blocks: int
    bytes: int
    checkpoint_s: float
    encode_s: float
    total_s: float
    blocked_s: float


class Cold(NamedTuple):
    """All results of cold starts."""

    starts: list[StartTimes]
    snapshots: list[SnapshotCost]


class _Began(NamedTuple):
    connected_s: float
    caught_up_s: float
    proven_s: float


async def cold(plan: EventsPlan, on_progress: Callable[[str], None]) -> Cold:
    """Measure all ways to start; `on_progress` gets the name of each before it is measured."""
    async with Stage() as stage:
        on_progress("blocks are being held")
        agent = await stage.child(
            "events.agent",
            workers=[{"id": _WORKER, "dp_ranks": plan.ranks, "ring_bytes": _RING_BYTES}],
            block_size=BLOCK_TOKENS,
        )
        bench = _ColdBench(plan, stage, agent, await stage.child("events.bare"), on_progress)
        await bench.hold(0, plan.rank_blocks)
        from_log = await bench.from_log()
        snapshots = await bench.snapshots()
        await bench.hold(plan.ranks, plan.tail_blocks)
        from_snapshot = await bench.from_snapshot()
        return Cold([from_snapshot, from_log, await bench.from_dumps()], snapshots)


class _ColdBench(NamedTuple):
    """The processes that run throughout; each new index is a new process."""

    plan: EventsPlan
    stage: Stage
    agent: Child
    bare: Child
    on_progress: Callable[[str], None]

    async def hold(self, seed: int, blocks: int) -> None:
        """Let each rank hold so many more blocks, each rank with its own seed; their events are in the log."""
        for dp_rank in range(self.plan.ranks):
            load = EventLoad(seed + dp_rank, blocks, EVENT_BLOCKS, BLOCK_TOKENS)
            await self.agent.call("hold", worker=_WORKER, dp_rank=dp_rank, load=load._asdict())

    async def from_log(self) -> StartTimes:
        last_seq = (await self.stage.log.stream_state(subjects.EVENTS_STREAM)).last_seq
        read = await self.bare.call("copy", after_seq=0, last_seq=last_seq)
        blocks = self.plan.ranks * self.plan.rank_blocks
        return await self._start("the log", blocks, read["bytes"], read["seconds"])

    async def snapshots(self) -> list[SnapshotCost]:
        """Write some snapshots and return what each took; the last one stays."""
        self.on_progress("a snapshot is written")
        keeper, written = await self.stage.child("events.snapshot"), list[SnapshotCost]()
        for _ in range(self.plan.rounds):
            figures = await keeper.call("write")
            written.append(SnapshotCost(blocks=self.plan.ranks * self.plan.rank_blocks, **figures))
        await keeper.close()
        return written

    async def from_snapshot(self) -> StartTimes:
        read = await self.bare.call("get", bucket=subjects.SNAPSHOT_BUCKET)
        blocks = self.plan.ranks * (self.plan.rank_blocks + self.plan.tail_blocks)
        return await self._start("a snapshot, and the log behind it", blocks, read["bytes"], read["seconds"])

    async def from_dumps(self) -> StartTimes:
        """Delete the log and the snapshots before the start."""
        bucket = self.stage.log.objects(subjects.SNAPSHOT_BUCKET)
        for name in await bucket.names():
            await bucket.delete(name)
        last_seq = (await self.stage.log.stream_state(subjects.EVENTS_STREAM)).last_seq
        await self.stage.log.purge(subjects.EVENTS_STREAM, last_seq)
        blocks = self.plan.ranks * (self.plan.rank_blocks + self.plan.tail_blocks)
        return await self._start("dumps alone", blocks, 0, None)

    async def _start(self, name: str, blocks: int, size: int, limit_s: float | None) -> StartTimes:
        rounds = []
        for _ in range(self.plan.rounds):
            self.on_progress(f"from {name}")
            rounds.append(await self._begin(blocks))
        return StartTimes(
            name=name,
            blocks=blocks,
            bytes=size,
            connected_s=median(each.connected_s for each in rounds),
            caught_up_s=median(each.caught_up_s for each in rounds),
            proven_s=median(each.proven_s for each in rounds),
            limit_s=limit_s,
            rounds=len(rounds),
        )

    async def _begin(self, blocks: int) -> _Began:
        index = await self.stage.child("events.index")
        proven = await index.call("proven", ranks=self.plan.ranks)
        await index.close()
        if proven["held_blocks"] != blocks:
            raise BenchFailed(f"the index holds {proven['held_blocks']} blocks, and not {blocks}")
        moments = (index.started["connected_ns"], proven["caught_up_ns"], proven["proven_ns"])
        return _Began(*((moment - index.spawned_ns) / 1e9 for moment in moments))
