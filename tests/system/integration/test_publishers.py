"""Publishers on real sockets: those that die and begin anew, and a host tier's beside an engine that is polled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from bench.capture.payloads import encode_payload
from kv_protocol.events import Tier
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from tests.support.manual_clock import ManualClock
from tests.support.parts import at_work
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import (
    RANK,
    Agent,
    PlayedSource,
    endpoint_of,
    hashes_of,
    playing,
    polled_agent,
    running_index,
    subscribed_agent,
    until_converged,
    zmq_context,
)
from tests.system.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine, tokens_of
from worker_agent.events.consolidation import SOLE, Origin
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.engine_events import EngineStored
from worker_agent.events.publishers import PublisherSection
from worker_agent.events.source_cursor import Delivery

NAMES = 1000
"""What the host tier's owner adds to a block's number: it has names of its own."""


def stored(*blocks: int, tier: Tier = Tier.GPU, names: int = 0) -> EngineStored:
    """Block n is the tokens n, n; a source that adds `names` to its hashes has names of its own."""
    return EngineStored(
        block_hashes=tuple(block + names for block in blocks),
        parent_block_hash=None,
        token_ids=tuple(tokens_of(blocks)),
        block_size=BLOCK_SIZE,
        tier=tier,
    )


class Publisher(PlayedSource):
    """A publisher that may begin anew, on the addresses of its former life."""

    def __init__(self, context: zmq.asyncio.Context, group: asyncio.TaskGroup) -> None:
        self._context, self._group = context, group
        publish, replay = self._sockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        super().__init__(publish, replay)
        self._endpoints = [endpoint_of(socket) for socket in (publish, replay)]
        self._serving = group.create_task(self.serve())

    def _sockets(self, *endpoints: str) -> list[zmq.asyncio.Socket]:
        """Raise `ZMQError` where an address is taken: a closed socket gives up its own a moment later."""
        sockets = [self._context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER)]
        sockets[0].set(zmq.XPUB_VERBOSE, 1)
        try:
            for socket, endpoint in zip(sockets, endpoints, strict=True):
                socket.set(zmq.LINGER, 0)
                socket.bind(endpoint)
        except zmq.ZMQError:
            for socket in sockets:
                socket.close()
            raise
        return sockets

    async def tell(self, *blocks: int) -> None:
        for block in blocks:
            await self.add(encode_payload(1.0, [stored(block)], 0))

    def die(self) -> None:
        """Nothing more is sent, also of what is on its way."""
        self._serving.cancel()
        self.publish.close()
        self.replay.close()

    async def begin_anew(self) -> None:
        self.die()
        await self.live_again()

    async def live_again(self) -> None:
        await eventually(lambda: self._is_bound(*self._endpoints))
        self.ring, self.sequence = {}, 0
        self._serving = self._group.create_task(self.serve())
        await self.subscribed()

    def _is_bound(self, *endpoints: str) -> bool:
        try:
            self.publish, self.replay = self._sockets(*endpoints)
        except zmq.ZMQError:
            return False
        return True


@asynccontextmanager
async def published(log: EventLog, *, has_replay: bool = True) -> AsyncIterator[tuple[Publisher, Agent]]:
    """An engine's publisher, and a consolidator that has subscribed to it."""
    async with zmq_context() as context, asyncio.TaskGroup() as group:
        engine = Publisher(context, group)
        replay = endpoint_of(engine.replay) if has_replay else ""
        async with subscribed_agent(log, context, endpoint_of(engine.publish), replay) as agent:
            await engine.subscribed()
            yield engine, agent
        engine.die()


async def until_all_read(agent: Agent, publisher: Publisher) -> None:
    await eventually(lambda: agent.cursor.expected == publisher.sequence)


async def test_a_replay_is_not_given_up_because_its_frames_take_long_to_apply() -> None:
    clock, applied = ManualClock(), list[int]()

    async def deliver(_: Origin, delivery: Delivery) -> None:
        for sequence, _payload in delivery.payloads:
            applied.append(sequence)
            await clock.advance(0.1)

    async with zmq_context() as context, playing(context) as (source,):
        source.ring = dict.fromkeys(range(100), b"x")
        at = PublisherAddress(SOLE, endpoint_of(source.publish), endpoint_of(source.replay))
        subscriber = EngineEventSubscriber(at, context, clock)
        subscriber.answer_s, subscriber.cursor.idle_s = 0.1, 60.0
        async with at_work(subscriber.part(deliver, 0)):
            await eventually(lambda: len(applied) >= 100)
    assert applied == list(range(100))
    assert subscriber.cursor.replays_total == 1


@pytest.mark.parametrize("told_before", [0, 1, 5])
@pytest.mark.parametrize("told_after", [0, 1, 9])
async def test_a_publisher_that_begins_anew_on_its_endpoint_is_noticed_and_had_whole(
    broker: Broker, log: EventLog, told_before: int, told_after: int
) -> None:
    async with running_index(broker.url) as index, published(log) as (engine, agent):
        await engine.tell(*range(1, told_before + 1))
        await until_all_read(agent, engine)
        await engine.begin_anew()
        await engine.tell(*range(101, 101 + told_after))
        await eventually(lambda: agent.cursor.restarts_total == (told_before > 0))  # until then it may look all read
        await until_all_read(agent, engine)
        await eventually(lambda: agent.cursor.is_settled)
        told = {hashes_of(block)[0] for block in range(101, 101 + told_after)}
        await eventually(lambda: set(agent.tiers()) == told)
        assert agent.cursor.restarts_total == (told_before > 0)
        await until_converged(index, agent)


async def test_without_replay_a_new_life_that_continues_the_count_is_noticed_by_its_connection(log: EventLog) -> None:
    async with published(log, has_replay=False) as (engine, agent):
        await engine.tell(*range(1, 6))
        await until_all_read(agent, engine)
        await engine.begin_anew()
        engine.sequence = 5
        await engine.tell(101)
        await eventually(lambda: set(agent.tiers()) == {hashes_of(101)[0]})
        assert agent.cursor.restarts_total == 1


@pytest.mark.parametrize("has_replay", [False, True])
async def test_a_publisher_that_is_not_there_is_told_as_a_reason_until_it_is(log: EventLog, has_replay: bool) -> None:
    async with published(log, has_replay=has_replay) as (engine, agent):
        await engine.tell(1)
        await until_all_read(agent, engine)
        assert agent.consolidator.stale(0) == ""
        endpoint = endpoint_of(engine.publish)
        engine.die()
        await eventually(lambda: f"engine: publisher {endpoint} is not connected" in agent.consolidator.stale(0))
        await engine.live_again()
        await eventually(lambda: agent.consolidator.stale(0) == "")


async def test_a_port_that_closes_each_connection_is_no_publisher_and_does_not_fill_the_log(log: EventLog) -> None:
    accepted = 0

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    async with server, zmq_context() as context:
        with capture_logs() as lines:
            async with subscribed_agent(log, context, endpoint) as agent:
                reason = f"no events: engine: publisher {endpoint} cannot be reached"
                await eventually(lambda: agent.consolidator.stale(0) == reason and accepted >= 8)
        assert [line["event"] for line in lines].count("publisher_disconnected") == 1


async def test_blocks_that_only_the_host_tier_s_owner_knows_are_indexed_on_the_host(
    broker: Broker, log: EventLog
) -> None:
    engine, one, two = ScriptedEngine(), *hashes_of(1, 2)
    async with running_index(broker.url) as index, zmq_context() as context, playing(context) as (kvbm,):
        configured = PublisherSection(
            source="kvbm", endpoint=endpoint_of(kvbm.publish), replay_endpoint=endpoint_of(kvbm.replay)
        )
        async with polled_agent(log, engine, EngineEventSubscriber(configured.at, context, Clock())) as agent:
            await kvbm.subscribed()
            engine.store(1)
            await agent.position()
            await kvbm.add(encode_payload(1.0, [stored(1, 2, tier=Tier.HOST, names=NAMES)], 0))
            expected = {one: (Tier.GPU, Tier.HOST), two: (Tier.HOST,)}
            await eventually(lambda: agent.tiers() == expected)
            await eventually(lambda: {row.sequence_hash: tuple(row.tiers) for row in index.held(RANK)} == expected)
            assert index.overlap([one, two], [RANK])[0].overlap_blocks[:2] == (1, 2)
