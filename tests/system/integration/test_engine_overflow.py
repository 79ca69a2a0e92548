"""An engine whose event buffer overflows: its rank is in doubt until it is learnt anew, and then as known as can be."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import zmq.asyncio

from indexer.embedded import EmbeddedIndex
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, run_parts, until
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import MODEL, RANK, WORKER, running_index
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.types import EngineDescription, EngineRequest
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.event_path import EventPath
from worker_agent.events.mirror import ENGINE
from worker_agent.events.source_poller import Source

BLOCK_SIZE, BUFFER_EVENTS = 4, 8


class Gate:
    """Lets polls through while it is open, or as many as it was told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: float = float("inf")
        self.waiting = 0

    def let(self, polls: float) -> None:
        """So many more polls go through; infinitely many: it is open."""
        with self._changed:
            self._left = polls
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self.waiting += 1
            self._changed.wait_for(lambda: self._left > 0)
            self.waiting -= 1
            self._left -= 1


@dataclass
class Agent:
    """A simulated engine with a small event buffer, and everything up to the log."""

    engine: SimulatedEngine
    rules: TrtllmRules
    path: EventPath
    gate: Gate
    requests: int = 0

    async def generate(self, tokens: int) -> None:
        """A prompt that no request had before was answered, and its blocks are cached."""
        self.requests += 1
        prompt = tuple(1000 * self.requests + token for token in range(tokens))
        request = EngineRequest(request_id=f"r{self.requests}", prompt=prompt, max_tokens=2)
        async for _ in self.engine.generate(request):
            pass

    @property
    def stale(self) -> str:
        return self.path.consolidator.stale(0)

    def held(self) -> set[int]:
        return {block.sequence_hash for chunk in self.path.consolidator.core.dump(0, 0) for block in chunk.blocks()}

    async def until_known(self, index: EmbeddedIndex) -> None:
        """Return once the index holds what the agent does, and takes it for current."""
        await eventually(
            lambda: (
                {block.sequence_hash for block in index.held(RANK)} == self.held()
                and index.overlap((), [RANK])[0].stale == ""
            )
        )


@asynccontextmanager
async def running_agent(log: EventLog) -> AsyncIterator[Agent]:
    clock, gate, stop, context = SystemClock(), Gate(), asyncio.Event(), zmq.asyncio.Context()
    description = EngineDescription(
        model=MODEL,
        version="1",
        event_source="simulated",
        block_size=BLOCK_SIZE,
        total_kv_blocks=512,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_seq_len=128,
    )
    engine = SimulatedEngine(Simulator(description, event_buffer_max_size=BUFFER_EVENTS), clock, speed=1000.0)
    rules = TrtllmRules(BLOCK_SIZE)

    def polled(timeout_s: float) -> list[dict[str, Any]]:
        gate.wait()
        return engine.kv_events(timeout_s)

    source = Source(
        polled, rules.translate, buffer_events=BUFFER_EVENTS, stale=rules.stale, events_lost=rules.events_lost
    )
    epochs = iter(range(100, 200))
    core = Consolidation((0,), BLOCK_SIZE, "i", lambda: next(epochs), origins=[Origin(ENGINE)])
    path = EventPath(
        {ENGINE: source},
        core,
        log,
        context,
        clock,
        model=MODEL,
        worker_id=WORKER,
        poll_s=0.01,
    )

    async def drive(stop: asyncio.Event) -> None:
        await until(stop, engine.run())

    try:
        await engine.start()
        await path.consolidator.start()
        async with asyncio.TaskGroup() as group:
            parts = [Part("engine", drive, 0), *path.parts(1), Part("event-log", log.run, 6)]
            group.create_task(run_parts(parts, stop=stop, drain_s=5.0))
            try:
                yield Agent(engine, rules, path, gate)
            finally:
                gate.let(float("inf"))
            stop.set()
    finally:
        context.destroy(linger=0)


@pytest.mark.asyncio
async def test_a_rank_whose_engine_lost_events_is_in_doubt_until_it_is_learnt_anew(
    broker: Broker, log: EventLog
) -> None:
    async with running_agent(log) as agent, running_index(broker.url) as index:
        await agent.generate(16)
        await agent.path.position()
        await agent.until_known(index)
        before = agent.held()
        assert len(before) == 4
        agent.gate.let(0)
        await eventually(lambda: agent.gate.waiting)
        for _ in range(20):
            await agent.generate(16)
        agent.gate.let(1)
        await eventually(lambda: agent.rules.events_lost.get(0, 0))
        lost = agent.rules.events_lost[0]
        await eventually(lambda: agent.stale == f"engine: {lost} events lost, relearning")
        await eventually(lambda: index.overlap((), [RANK])[0].stale == "source")
        assert not before & agent.held()

        agent.gate.let(float("inf"))
        await eventually(lambda: agent.stale == "")
        await agent.generate(32)
        await agent.path.position()
        await agent.until_known(index)
        drain = agent.path.pollers[ENGINE].drain
        assert 8 <= len(agent.held()) <= len(agent.engine.held_hashes())
        assert not drain.is_pressed
        assert drain.statistics().pressed_cycles_total > 0
        assert drain.statistics().largest_ratio == 1.0


@pytest.mark.asyncio
async def test_a_loss_is_not_over_before_the_log_has_what_followed_it(broker: Broker, log: EventLog) -> None:
    async with running_agent(log) as agent, running_index(broker.url) as index:
        await agent.generate(16)
        await agent.path.position()
        agent.gate.let(0)
        await eventually(lambda: agent.gate.waiting)
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        for _ in range(20):
            await agent.generate(16)
        agent.gate.let(float("inf"))
        await eventually(lambda: agent.rules.events_lost.get(0, 0))
        await agent.path.position()
        await agent.path.position()
        assert "events lost, relearning" in agent.stale
        await broker.start()
        await eventually(lambda: agent.stale == "")
        await agent.until_known(index)
