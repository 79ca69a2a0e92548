"""Sources that publish themselves, read where they are: a host tier beside an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.capture.payloads import encode_payload
from kv_protocol.events import Tier
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import (
    RANK,
    WORKER,
    PlayedSource,
    endpoint_of,
    hashes_of,
    playing,
    running_index,
    zmq_context,
)
from tests.system.integration.polled_engine import PolledAgent, RoughEngine, polled_agent
from tests.system.integration.test_several_publishers import stored
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber
from worker_agent.events.engine_events import EngineStored
from worker_agent.events.publishers import PublisherSection

KVBM = Origin("kvbm")
NAMES = 1000
"""What the host tier's owner adds to a block's number: it has names of its own."""


async def tell(source: PlayedSource, event: EngineStored, dp_rank: int = 0) -> None:
    await source.add(encode_payload(1.0, [event], dp_rank))


def on_host(*blocks: int) -> EngineStored:
    return stored(*blocks, tier=Tier.HOST, names=NAMES)


@asynccontextmanager
async def host_tier(log: EventLog, engine: RoughEngine) -> AsyncIterator[tuple[PolledAgent, PlayedSource]]:
    """An agent of a polled engine and of a host tier's source, and the source."""
    async with zmq_context() as context, playing(context) as (kvbm,):
        configured = PublisherSection(
            source=KVBM.source, endpoint=endpoint_of(kvbm.publish), replay_endpoint=endpoint_of(kvbm.replay)
        )
        async with polled_agent(log, engine, [EngineEventSubscriber(configured.at, context, SystemClock())]) as agent:
            await kvbm.subscribed()
            yield agent, kvbm


# -------------------------------------------------------------------- a host tier beside the engine
async def test_blocks_that_only_the_host_tier_s_owner_knows_are_indexed_on_the_host(
    broker: Broker, log: EventLog
) -> None:
    engine = RoughEngine()
    async with running_index(broker.url) as index, host_tier(log, engine) as (agent, kvbm):
        engine.store(1)
        await agent.until_read()
        await tell(kvbm, on_host(1, 2))
        one, two = hashes_of(1, 2)
        expected = {one: (Tier.GPU, Tier.HOST), two: (Tier.HOST,)}
        await eventually(lambda: agent.tiers() == expected)
        await eventually(lambda: {row.sequence_hash: tuple(row.tiers) for row in index.held(RANK)} == expected)
        assert index.overlap(hashes_of(1, 2), [WorkerRank(WORKER, 0)])[0].overlap_blocks[:2] == (1, 2)
