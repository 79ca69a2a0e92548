"""An index that runs on a real log, and what a test asks of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import generate_latest

from indexer.embedded import EmbeddedIndex, ensure_streams
from indexer.follow.fold import TICK_S, IndexFold, RankView
from indexer.follow.follower import FollowerLimits
from indexer.native.index import make_index
from indexer.service.history import moment_at
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.tracing.service import EventTracing
from tests.support.manual_clock import ManualClock
from tests.support.parts import at_work
from tests.system.integration.broker import eventually
from tests.system.integration.scripted_rank import ScriptedRank

NATS = NatsSection(events_max_bytes=1 << 24)
WAIT_S = 10.0
_LIMITS = FollowerLimits()


def gpu(blocks: int) -> tuple[int, int, int, int]:
    """Return how deep the prefix goes with each tier and those before it, for blocks on the GPU."""
    return (blocks,) * 4


async def index_at(log: EventLog, seq: int) -> IndexFold:
    """Return the fold after message `seq` of the log, in a native index."""
    fold = IndexFold(make_index(IndexSection()))
    return (await moment_at(log, seq, fold)).fold


@dataclass(frozen=True)
class Index:
    """An index that runs, and its connection."""

    index: EmbeddedIndex
    log: EventLog
    clock: ManualClock

    async def until_at(self, scripted: ScriptedRank) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.index.wait_for(scripted.rank, scripted.epoch, scripted.seq)

    async def until_stale(self, rank: WorkerRank, reason: str) -> None:
        await eventually(lambda: self.view(rank).stale == reason, f"{self.view(rank).stale!r} is not {reason!r}")

    async def pass_time(self, seconds: float) -> None:
        """Let the index's clock go on, and no other clock."""
        for _ in range(round(seconds / TICK_S)):
            await self.clock.advance(TICK_S)
            for _ in range(20):
                await asyncio.sleep(0)

    def view(self, rank: WorkerRank, *hashes: int) -> RankView:
        return self.index.overlap(hashes, [rank])[0]

    def happened(self, name: str, rank: WorkerRank) -> int:
        value: int = getattr(self.index.statistics().streams[rank].counts, name)
        return value

    def metrics(self) -> str:
        registry = new_registry()
        Projection(registry, self.index.families)
        return generate_latest(registry).decode()


@asynccontextmanager
async def running_index(
    url: str,
    clock: Clock | None = None,
    settings: IndexSection | None = None,
    nats: NatsSection = NATS,
    tracing: EventTracing | None = None,
    limits: FollowerLimits = _LIMITS,
) -> AsyncIterator[Index]:
    manual, log = ManualClock(), await EventLog.connect(url, name="index")
    try:
        await ensure_streams(log, nats)
        index = EmbeddedIndex(settings or IndexSection(), log, clock or manual, nats, limits=limits, tracing=tracing)
        await index.start()
        async with at_work(*index.parts(0)):
            yield Index(index, log, manual)
    finally:
        await log.close()
