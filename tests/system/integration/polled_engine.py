"""An agent's event path on real sockets, from an engine that says and does what a test wants, to the log."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kv_protocol.events import Tier
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Restarts
from tests.support.parts import at_work
from tests.system.integration.broker import WAIT_S, eventually
from tests.system.integration.event_path import MODEL, WORKER, hashes_of
from tests.system.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber
from worker_agent.events.engine_events import RankEvent
from worker_agent.events.source_poller import Source, SourcePoller

PATIENT = Restarts(failures_max=5, window_s=60.0, pause_s=0.0)


class RoughEngine(ScriptedEngine):
    """Says anything as an event; a poll raises what a test put there, once."""

    def __init__(self, dp_ranks: tuple[int, ...] = (0,)) -> None:
        super().__init__(dp_ranks)
        self.errors: list[Exception] = []
        self.late_errors: list[Exception] = []
        """Raised, one a poll that brought something, once all that it brought was read."""

    def kv_events(self, timeout_s: float) -> list[Any]:
        events = super().kv_events(timeout_s)
        if self.errors:
            raise self.errors.pop(0)
        return events

    def say(self, *events: object) -> None:
        """These are events, whatever they are."""
        with self._changed:
            self._events.extend(events)  # type: ignore[arg-type]
            self._changed.notify_all()

    def skip(self, ids: int, dp_rank: int = 0) -> None:
        """So many events of the rank are made, and lost; below 0: the ids go back."""
        self._next_id[dp_rank] += ids


@dataclass
class PolledAgent:
    """What runs, and what it knows."""

    engine: RoughEngine
    rules: TrtllmRules
    path: Consolidator
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def poller(self) -> SourcePoller:
        assert self.path.poller is not None
        return self.path.poller

    @property
    def stale(self) -> str:
        return self.path.stale(0)

    def tiers(self, dp_rank: int = 0) -> dict[int, tuple[Tier, ...]]:
        """Return where each block that the rank holds is."""
        chunks = self.path.core.dump(dp_rank, 0)
        return {block.sequence_hash: tuple(block.tiers) for chunk in chunks for block in chunk.blocks()}

    def holds(self, *blocks: int, dp_rank: int = 0) -> bool:
        """Return whether the rank holds this chain, and nothing else."""
        return set(self.tiers(dp_rank)) == set(hashes_of(*blocks))

    async def until_read(self) -> None:
        """Return once all that the engine had said before is in the ranks' streams."""
        await eventually(lambda: self.engine.is_polled_dry)
        async with asyncio.timeout(WAIT_S):
            await self.path.position()


class RoughRules(TrtllmRules):
    """Raise what a test put into the engine's `late_errors`."""

    def __init__(self, engine: RoughEngine) -> None:
        super().__init__(BLOCK_SIZE)
        self._engine = engine

    def translate(self, engine_events: object) -> list[RankEvent]:
        read = super().translate(engine_events)
        if engine_events and self._engine.late_errors:
            raise self._engine.late_errors.pop(0)
        return read


@asynccontextmanager
async def polled_agent(
    log: EventLog, engine: RoughEngine, readers: Sequence[EngineEventSubscriber] = ()
) -> AsyncIterator[PolledAgent]:
    """The whole path runs, with `readers` of further sources."""
    rules, origins = RoughRules(engine), [SOLE, *(each.origin for each in readers)]
    core = Consolidation(engine.describe().dp_ranks, BLOCK_SIZE, "i", count(100).__next__, origins=origins)
    path = Consolidator(
        core,
        readers,
        log,
        SystemClock(),
        model=MODEL,
        worker_id=WORKER,
        source=Source(engine.kv_events, rules),
        poll_s=0.01,
        restarts=PATIENT,
    )
    agent = PolledAgent(engine, rules, path)
    await path.start()
    async with at_work(*path.parts(0), stop=agent.stop):
        yield agent
