"""An agent's event path on real sockets, from an engine that says and does what a test wants, to the log."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from kv_protocol.events import Tier
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Restarts
from tests.support.parts import at_work
from tests.system.integration.broker import WAIT_S, eventually
from tests.system.integration.event_path import MODEL, WORKER, hashes_of
from tests.system.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_event_subscriber import PublisherAddress
from worker_agent.events.engine_events import RankEvent
from worker_agent.events.event_path import EventPath, origins_of
from worker_agent.events.mirror import ENGINE
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
    path: EventPath
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def poller(self) -> SourcePoller:
        return self.path.pollers[ENGINE]

    @property
    def stale(self) -> str:
        return self.path.consolidator.stale(0)

    def tiers(self, dp_rank: int = 0) -> dict[int, tuple[Tier, ...]]:
        """Return where each block that the rank holds is."""
        chunks = self.path.consolidator.core.dump(dp_rank, 0)
        return {block.sequence_hash: tuple(block.tiers) for chunk in chunks for block in chunk.blocks()}

    def holds(self, *blocks: int, dp_rank: int = 0) -> bool:
        """Return whether the rank holds this chain, and nothing else."""
        return set(self.tiers(dp_rank)) == set(hashes_of(*blocks))

    async def until_read(self) -> None:
        """Return once all that the engine had said before is in the ranks' streams."""
        await eventually(lambda: self.engine.is_polled_dry)
        async with asyncio.timeout(WAIT_S):
            await self.path.position()


def made_agent(
    log: EventLog,
    engine: RoughEngine,
    context: zmq.asyncio.Context,
    *,
    published: Sequence[PublisherAddress] = (),
) -> PolledAgent:
    """Return the whole path, of which nothing runs."""
    rules = TrtllmRules(BLOCK_SIZE)

    def translate(events: list[Any]) -> list[RankEvent]:
        read = rules.translate(events)
        if events and engine.late_errors:
            raise engine.late_errors.pop(0)
        return read

    source = Source(
        engine.kv_events, translate, stale=rules.stale, events_lost=rules.events_lost, quarantine=rules.quarantine
    )
    sources = {ENGINE: source}
    epochs = iter(range(100, 200))
    core = Consolidation(
        engine.describe().dp_ranks, BLOCK_SIZE, "i", lambda: next(epochs), origins=origins_of(sources, published)
    )
    path = EventPath(
        sources,
        core,
        log,
        context,
        SystemClock(),
        model=MODEL,
        worker_id=WORKER,
        poll_s=0.01,
        published=published,
        restarts=PATIENT,
    )
    return PolledAgent(engine, rules, path)


@asynccontextmanager
async def polled_agent(
    log: EventLog,
    engine: RoughEngine,
    *,
    published: Sequence[PublisherAddress] = (),
    context: zmq.asyncio.Context | None = None,
) -> AsyncIterator[PolledAgent]:
    """The whole path runs."""
    own = context or zmq.asyncio.Context()
    agent = made_agent(log, engine, own, published=published)

    try:
        await agent.path.consolidator.start()
        async with at_work(*agent.path.parts(0), stop=agent.stop):
            yield agent
    finally:
        if context is None:
            own.destroy(linger=0)
