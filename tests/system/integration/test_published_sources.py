"""Sources that publish themselves, read where they are: an engine that streams its events, a host tier beside one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.capture.payloads import encode_payload
from kv_protocol.events import Tier
from kv_protocol.ids import WorkerRank
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
from tests.unit.worker_agent.engine_arguments import effective
from worker_agent.engines.trtllm.publishers import engine_publishers
from worker_agent.events.consolidation import Origin
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
        async with polled_agent(log, engine, published=(configured.at,), context=context) as agent:
            await kvbm.subscribed()
            yield agent, kvbm


# -------------------------------------------------------------------- an engine that streams
async def test_an_engine_that_streams_is_read_at_the_ports_of_its_ranks_and_never_polled(log: EventLog) -> None:
    async with zmq_context() as context, playing(context, 2) as ranks:
        publish, replays = (endpoint_of(each).replace("127.0.0.1", "*") for each in (ranks[0].publish, ranks[0].replay))
        config = {"enable_kv_cache_events": True, "endpoint": publish, "replay_endpoint": replays}
        cache = {"kv_cache_config": {"kv_events_config": config}}
        args = effective(cache | {"tensor_parallel_size": 2, "enable_attention_dp": True})
        engine = RoughEngine((0, 1))
        engine.store(9)
        at = engine_publishers(args)
        async with polled_agent(log, engine, published=at, context=context, is_polled=False) as agent:
            for each in ranks:
                await each.subscribed()
            await tell(ranks[0], stored(1, 2))
            await tell(ranks[1], stored(3), dp_rank=1)
            await eventually(lambda: agent.holds(1, 2) and agent.holds(3, dp_rank=1))
            await tell(ranks[1], stored(4))  # not that publisher's rank
            await eventually(lambda: "dp_rank: found 0, allowed 1" in agent.path.consolidator.stale(1))
            assert not engine.is_polled_dry
            assert [each["source"] for each in agent.path.status()] == ["engine-0", "engine-1"]
            assert (await agent.path.position()).keys() == {0, 1}


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
