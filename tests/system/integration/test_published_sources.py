"""Sources that publish themselves, read where they are: an engine that streams its events, a host tier beside one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
import zmq
import zmq.asyncio

from bench.capture.payloads import encode_payload
from kv_protocol.events import Tier
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import WAIT_S, Broker, eventually
from tests.system.integration.event_path import (
    RANK,
    WORKER,
    PlayedSource,
    endpoint_of,
    hashes_of,
    running_index,
    zmq_context,
)
from tests.system.integration.polled_engine import PolledAgent, RoughEngine, polled_agent
from tests.system.integration.scripted_engine import BLOCK_SIZE, tokens_of
from tests.unit.worker_agent.engine_arguments import effective
from worker_agent.engines.attached.config import PublisherSection
from worker_agent.events.attached_streams import published_at
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import PublisherAt
from worker_agent.events.engine_events import EngineEvent, EngineRemoved, EngineStored
from worker_agent.events.engine_publishers import engine_publishers

KVBM = Origin("kvbm")
NAMES = 1000
"""What the host tier's owner adds to a block's number: it has names of its own."""


class Source(PlayedSource):
    """A publisher that numbers what it tells."""

    async def tell(self, *events: EngineEvent, dp_rank: int = 0) -> None:
        sequence = len(self.ring)
        self.ring[sequence] = encode_payload(1.0, events, dp_rank)
        await self.live(sequence)

    async def subscribed(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.publish.recv() != b"\x01":
                pass


def stored(*blocks: int, parent: int | None = None, tier: Tier = Tier.GPU, names: int = 0) -> EngineStored:
    return EngineStored(
        block_hashes=tuple(block + names for block in blocks),
        parent_block_hash=None if parent is None else parent + names,
        token_ids=tuple(tokens_of(blocks)),
        block_size=BLOCK_SIZE,
        tier=tier,
    )


def on_host(*blocks: int) -> EngineStored:
    return stored(*blocks, tier=Tier.HOST, names=NAMES)


def off_host(*blocks: int) -> EngineRemoved:
    return EngineRemoved(block_hashes=tuple(block + NAMES for block in blocks), tier=Tier.HOST)


@contextmanager
def bound(context: zmq.asyncio.Context, kind: int, ports: int) -> Iterator[tuple[int, list[zmq.asyncio.Socket]]]:
    """Sockets on so many ports in a row, and the first of them."""
    for _ in range(50):
        with ExitStack() as cleanup:
            sockets = [cleanup.enter_context(context.socket(kind)) for _ in range(ports)]
            sockets[0].bind("tcp://127.0.0.1:*")
            first = int(endpoint_of(sockets[0]).rpartition(":")[2])
            try:
                for at, socket in enumerate(sockets[1:], start=1):
                    socket.bind(f"tcp://127.0.0.1:{first + at}")
            except zmq.ZMQError:
                continue  # another process has the port
            yield first, sockets
            return
    raise AssertionError("no ports in a row")


@asynccontextmanager
async def host_tier(
    log: EventLog, engine: RoughEngine
) -> AsyncIterator[tuple[PolledAgent, Source, "asyncio.Task[None]"]]:
    """An agent of a polled engine and of a host tier's source; the source, and the task that answers its replays."""
    async with zmq_context() as context, asyncio.TaskGroup() as group:
        publish, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        for socket in (publish, replay):
            socket.bind("tcp://127.0.0.1:*")
        kvbm = Source(publish, replay)
        serving = group.create_task(kvbm.serve())
        configured = PublisherSection(
            source=KVBM.source, endpoint=endpoint_of(publish), replay_endpoint=endpoint_of(replay)
        )
        at = published_at(configured)
        async with polled_agent(log, engine, published=(at,), context=context) as agent:
            await kvbm.subscribed()
            yield agent, kvbm, serving
        serving.cancel()


# -------------------------------------------------------------------- an engine that streams
@pytest.mark.asyncio
async def test_an_engine_that_streams_is_read_at_the_ports_of_its_ranks_and_never_polled(log: EventLog) -> None:
    async with zmq_context() as context:
        with bound(context, zmq.XPUB, 2) as (first, publish), bound(context, zmq.ROUTER, 2) as (replays, replay):
            config = {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://*:{first}",
                "replay_endpoint": f"tcp://*:{replays}",
            }
            args = effective(
                {
                    "kv_cache_config": {"kv_events_config": config},
                    "tensor_parallel_size": 2,
                    "enable_attention_dp": True,
                }
            )
            ranks = [Source(*sockets) for sockets in zip(publish, replay, strict=True)]
            engine = RoughEngine((0, 1))
            engine.store(9)
            async with (
                polled_agent(log, engine, published=engine_publishers(args), context=context, is_polled=False) as agent,
                asyncio.TaskGroup() as group,
            ):
                serving = [group.create_task(each.serve()) for each in ranks]
                for each in ranks:
                    await each.subscribed()
                await ranks[0].tell(stored(1, 2), dp_rank=0)
                await ranks[1].tell(stored(3), dp_rank=1)
                await eventually(lambda: agent.holds(1, 2) and agent.holds(3, dp_rank=1))
                await ranks[1].tell(stored(4), dp_rank=0)  # not that publisher's rank
                await eventually(lambda: "dp_rank: found 0, allowed 1" in agent.path.consolidator.stale(1))
                assert not engine.is_polled_dry
                assert [each["source"] for each in agent.path.status()] == ["engine-0", "engine-1"]
                assert (await agent.path.position()).keys() == {0, 1}
                for task in serving:
                    task.cancel()


@pytest.mark.asyncio
async def test_a_stream_of_the_engine_that_cannot_be_read_is_shown_with_its_source(log: EventLog) -> None:
    async with zmq_context() as context:
        with bound(context, zmq.XPUB, 1) as (port, (publish,)), bound(context, zmq.ROUTER, 1) as (_, (replay,)):
            source = Source(publish, replay)
            at = PublisherAt(Origin("engine"), f"tcp://127.0.0.1:{port}")
            async with polled_agent(log, RoughEngine(), published=(at,), context=context, is_polled=False) as agent:
                await source.subscribed()
                source.ring[0] = b"\xc1"
                await source.live(0)
                await eventually(lambda: "unreadable batch" in agent.stale)
                (status,) = agent.path.status()
                assert (status["source"], status["failure"], status["lost"]) == ("engine", "", 0)
                assert len(status["refused"]) == 1


# -------------------------------------------------------------------- a host tier beside the engine
@pytest.mark.asyncio
async def test_blocks_that_only_the_host_tier_s_owner_knows_are_indexed_on_the_host(
    broker: Broker, log: EventLog
) -> None:
    engine = RoughEngine()
    async with running_index(broker.url) as index, host_tier(log, engine) as (agent, kvbm, _):
        engine.store(1)
        await agent.until_read()
        await kvbm.tell(on_host(1, 2))
        one, two = hashes_of(1, 2)
        expected = {one: (Tier.GPU, Tier.HOST), two: (Tier.HOST,)}
        await eventually(lambda: agent.tiers() == expected)
        await eventually(lambda: {row.sequence_hash: tuple(row.tiers) for row in index.held(RANK)} == expected)
        assert index.overlap(hashes_of(1, 2), [WorkerRank(WORKER, 0)])[0].overlap_blocks[:2] == (1, 2)


@pytest.mark.asyncio
async def test_what_one_source_removes_the_other_keeps(broker: Broker, log: EventLog) -> None:
    engine = RoughEngine()
    async with running_index(broker.url) as index, host_tier(log, engine) as (agent, kvbm, _):
        engine.store(1, 2)
        await agent.until_read()
        await kvbm.tell(on_host(1, 2))
        one, two = hashes_of(1, 2)
        await eventually(lambda: agent.tiers() == dict.fromkeys((one, two), (Tier.GPU, Tier.HOST)))
        engine.remove(2)
        await agent.until_read()
        assert agent.tiers() == {one: (Tier.GPU, Tier.HOST), two: (Tier.HOST,)}
        await kvbm.tell(off_host(1))
        await eventually(lambda: agent.tiers() == {one: (Tier.GPU,), two: (Tier.HOST,)})
        await kvbm.tell(off_host(2))
        await eventually(lambda: agent.tiers() == {one: (Tier.GPU,)})
        await eventually(lambda: [row.sequence_hash for row in index.held(RANK)] == [one])


@pytest.mark.asyncio
async def test_a_block_that_two_sources_hold_on_one_tier_is_held_until_the_last_removes_it(log: EventLog) -> None:
    engine = RoughEngine()
    async with host_tier(log, engine) as (agent, kvbm, _):
        engine.store(1)
        await agent.until_read()
        await kvbm.tell(stored(1, names=NAMES))
        counts = agent.path.consolidator.core.statistics
        await eventually(lambda: counts().ranks[0].counts["kvbm"].deduplicated == 1)
        engine.remove(1)
        await agent.until_read()
        assert agent.holds(1)
        await kvbm.tell(EngineRemoved(block_hashes=(1 + NAMES,)))
        await eventually(lambda: agent.tiers() == {})


@pytest.mark.asyncio
async def test_an_engine_whose_thread_failed_costs_nothing_of_the_host_tier(log: EventLog) -> None:
    engine = RoughEngine()
    async with host_tier(log, engine) as (agent, kvbm, _):
        engine.store(1, 2)
        await agent.until_read()
        await kvbm.tell(on_host(1))
        one, two = hashes_of(1, 2)
        await eventually(lambda: agent.tiers() == {one: (Tier.GPU, Tier.HOST), two: (Tier.GPU,)})
        engine.errors.append(ZeroDivisionError("ours"))
        engine.store(3)
        await eventually(lambda: agent.tiers() == {one: (Tier.HOST,)})


@pytest.mark.asyncio
async def test_a_host_tier_s_owner_that_is_gone_is_a_reason_of_its_own(log: EventLog) -> None:
    engine = RoughEngine()
    async with host_tier(log, engine) as (agent, kvbm, serving):
        await kvbm.tell(on_host(1))
        await eventually(agent.tiers)
        endpoint = endpoint_of(kvbm.publish)
        serving.cancel()
        kvbm.publish.close()
        await eventually(lambda: f"kvbm: publisher {endpoint} is not connected" in agent.stale)
        engine.store(2)
        await agent.until_read()
        assert hashes_of(2)[0] in agent.tiers()
