"""Sources that publish themselves, read where they are: an engine that streams its events, a host tier beside one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

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
from tests.system.integration.test_several_publishers import stored
from tests.unit.worker_agent.engine_arguments import effective
from worker_agent.engines.trtllm.publishers import engine_publishers
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_events import EngineEvent, EngineStored
from worker_agent.events.publisher_config import PublisherSection

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


def on_host(*blocks: int) -> EngineStored:
    return stored(*blocks, tier=Tier.HOST, names=NAMES)


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
        at = configured.at
        async with polled_agent(log, engine, published=(at,), context=context) as agent:
            await kvbm.subscribed()
            yield agent, kvbm, serving
        serving.cancel()


# -------------------------------------------------------------------- an engine that streams
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


# -------------------------------------------------------------------- a host tier beside the engine
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
