"""Cold start: an index in a new process, until it has caught up and until every rank is proven.

    the log      there is no snapshot: the index reads the whole log
    a snapshot   the index restores one and reads the log after it
    dumps        no snapshot, an empty log: the index requests a dump of every rank once it sees that it is behind

Time counts from before the process is started, with the interpreter and the imports. *Caught up* is what a router's
readiness waits for: the log that existed at the start was applied. *Proven*: a heartbeat at the position of each rank
found nothing wrong; heartbeats come once a second. The limits: the bare client reads the same messages, or the bytes of
the snapshot, and does nothing with them.
"""

from collections.abc import Callable
from typing import NamedTuple

from bench.child import Answer, BenchFailed, Child
from bench.events.load import EventLoad
from bench.events.observed import IndexRole
from bench.events.roles import AgentRole, BareRole, SnapshotRole
from bench.events.run import OURS, EventsPlan, Stage
from bench.tables import Rounds
from kv_protocol import subjects

BLOCK_TOKENS = 16
EVENT_BLOCKS = 64
_WORKER = "w0"


async def cold(plan: EventsPlan, results: Rounds, on_progress: Callable[[str], None]) -> None:
    """Measure all ways to start; `on_progress` gets the name of each once it is measured."""
    async with Stage() as stage:
        agent = await stage.child(AgentRole, worker=_WORKER, dp_ranks=plan.ranks, block_size=BLOCK_TOKENS)
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
            load = EventLoad(seed + dp_rank, blocks, EVENT_BLOCKS, BLOCK_TOKENS)
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
