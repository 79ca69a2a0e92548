"""`make engines`: lives of caches, told by the engines' own event and publisher classes, become what a fold says.

A life of a release: its publishers (one a rank) send over ZeroMQ; an agent reads them late, loses frames and asks for
replays; engines restart. Then the index behind the agent holds exactly what the life's caches hold.
`ENGINE_LIVES` lives (1,000) of each release; a failure names the seed, `ENGINE_SEED` runs that one.
"""

import asyncio
import atexit
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from itertools import count, cycle
from random import Random
from typing import Any

import pytest
import zmq.asyncio

from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import run_parts
from tests.support import engine_wheels
from tests.support.engine_lives import STEPS, Life, life_of
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import MODEL, NATS, connected, running_index
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.publishers import rank_endpoint

LIVES = int(os.environ.get("ENGINE_LIVES", "1000"))
AT_ONCE = 32
_CONVERGES_S = _DRAIN_S = 60.0


class _Lossy:
    """A publisher's socket that loses a part of what is sent."""

    def __init__(self, inner: Any, random: Random) -> None:
        self._inner, self._random = inner, random
        self.lost = 0

    def send_multipart(self, frames: Any) -> None:
        if self._random.random() < 0.1:
            self.lost += 1
        else:
            self._inner.send_multipart(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Engine:
    """The publishers of an engine's ranks, of the release's own class."""

    def __init__(self, module: Any, ranks: int, random: Random) -> None:
        self._module, self._random = module, random
        self.port = next(port for port in _PORTS if _are_free(port, 2 * ranks))
        self._ranks = ranks
        self.publishers: list[Any] = []
        self.replays = f"tcp://127.0.0.1:{self.port + ranks}"

    async def start(self) -> None:
        """Publish from sequence 0 on, at the same ports."""
        await eventually(lambda: _are_free(self.port, 2 * self._ranks))
        endpoints = f"tcp://*:{self.port}", f"tcp://*:{self.port + self._ranks}"
        self.publishers = [self._module.ZmqEventPublisher(rank, *endpoints, topic="kv") for rank in range(self._ranks)]
        for publisher in self.publishers:
            vars(publisher)["_pub"] = _Lossy(vars(publisher)["_pub"], self._random)

    def tell(self, rank: int, events: list[Any]) -> None:
        self.publishers[rank].publish(self._module.KVEventBatch(ts=1.5, events=events))

    async def end(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(each.shutdown) for each in self.publishers))
        for each in self.publishers:
            atexit.unregister(each.shutdown)


_PORTS = cycle(range(20_000, 32_000, 4))


def _are_free(first: int, ports: int) -> bool:
    with ExitStack() as cleanup, suppress(OSError):
        for port in range(first, first + ports):
            tried = cleanup.enter_context(socket.socket())
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            tried.bind(("", port))
            tried.listen()
        return True
    return False


@asynccontextmanager
async def _agent(life: Life, engine: _Engine, log: EventLog, worker_id: str) -> AsyncIterator[Consolidator]:
    """An agent of the engine, which joined after its first iterations."""
    context, clock, stop = zmq.asyncio.Context(), Clock(), asyncio.Event()
    origins = [Origin(dp_rank=rank if life.ranks > 1 else None) for rank in range(life.ranks)]
    core = Consolidation(
        tuple(range(life.ranks)), life.block_size, "i", count(1).__next__, origins=origins, is_eagle=life.lookahead > 0
    )
    readers = [
        EngineEventSubscriber(
            PublisherAddress(
                origin, rank_endpoint(f"tcp://127.0.0.1:{engine.port}", rank), rank_endpoint(engine.replays, rank)
            ),
            context,
            clock,
        )
        for rank, origin in enumerate(origins)
    ]
    for reader in readers:
        reader.cursor.idle_s = 0.2
    consolidator = Consolidator(core, readers, log, clock, model=MODEL, worker_id=worker_id)
    await consolidator.start()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(run_parts(consolidator.parts(0), stop=stop, drain_s=_DRAIN_S))
            yield consolidator
            stop.set()
    finally:
        context.destroy(linger=0)


async def _lived(life: Life, random: Random, module: Any, log: EventLog, index: EmbeddedIndex, name: str) -> None:
    engine = _Engine(module, life.ranks, random)
    await engine.start()
    restart_at = random.choice([None, None, random.randrange(STEPS)])
    joins_at = random.randrange(STEPS)
    async with AsyncExitStack() as cleanup:
        for step in range(STEPS):
            if step == joins_at:
                consolidator = await cleanup.enter_async_context(_agent(life, engine, log, name))
            if step == restart_at:
                await engine.end()
                life.begin_anew()
                await engine.start()
            for rank in range(life.ranks):
                if events := life.step(rank):
                    engine.tell(rank, events)
            if random.random() < 0.3:
                await Clock().sleep(0.01)
        if restart_at is not None:  # a publisher that sent nothing cannot be known to have restarted
            for rank in range(life.ranks):
                engine.tell(rank, [])
        for rank in range(life.ranks):
            await eventually(_holds(index, WorkerRank(name, rank), life.held(rank)), name, _CONVERGES_S)
            assert consolidator.core.stale(rank) == ""
        await engine.end()


def _holds(index: EmbeddedIndex, rank: WorkerRank, held: dict[int, int]) -> Callable[[], bool]:
    return lambda: {block.sequence_hash: block.tier_bits for block in index.held(rank)} == held


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", engine_wheels.FILES)
async def test_the_index_holds_what_the_engine_holds(release: str, broker: Broker) -> None:
    if not engine_wheels.is_there(release):
        pytest.skip("its wheel was not fetched: make engines")
    modules = engine_wheels.modules(release)
    only = os.environ.get("ENGINE_SEED")
    seeds = iter([int(only)] if only else range(LIVES))
    async with connected(broker.url) as log:
        await ensure_streams(log, NATS)
        async with running_index(broker.url) as index, asyncio.TaskGroup() as group:

            async def lives() -> None:
                for seed in seeds:
                    name = f"{release.replace('.', '-')}-{seed}"
                    life = life_of(release, seed, modules)
                    await _lived(life, Random(name), modules["kv_events"], log, index, name)

            for _ in range(AT_ONCE):
                group.create_task(lives())
    sys.stdout.write(f"{release}: lives of seeds {only or f'0..{LIVES - 1}'}\n")
