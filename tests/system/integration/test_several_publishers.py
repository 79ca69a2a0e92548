"""Several publishers of one worker on real sockets: sources, ranks, and publishers that die and begin anew."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from bench.capture.payloads import encode_payload
from kv_protocol.events import Tier
from kv_runtime.event_log import EventLog
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import (
    Agent,
    PlayedSource,
    consolidator_on,
    endpoint_of,
    hashes_of,
    running_agent,
    running_index,
    until_converged,
    zmq_context,
)
from tests.system.integration.scripted_engine import BLOCK_SIZE, tokens_of
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import PublisherAddress
from worker_agent.events.engine_events import EngineEvent, EngineStored

ENGINE, HOST = Origin("engine"), Origin("host")


def stored(*blocks: int, parent: int | None = None, tier: Tier = Tier.GPU, names: int = 0) -> EngineStored:
    """Block n is the tokens n, n; a source that adds `names` to its hashes has names of its own."""
    return EngineStored(
        block_hashes=tuple(block + names for block in blocks),
        parent_block_hash=None if parent is None else parent + names,
        token_ids=tuple(tokens_of(blocks)),
        block_size=BLOCK_SIZE,
        tier=tier,
    )


def tiers(agent: Agent, dp_rank: int = 0) -> dict[int, tuple[Tier, ...]]:
    return {block.sequence_hash: tuple(block.tiers) for block in agent.held(dp_rank)}


class Publisher(PlayedSource):
    """A publisher that may begin anew, on the addresses of its former life."""

    def __init__(self, context: zmq.asyncio.Context, group: asyncio.TaskGroup) -> None:
        self._context, self._group = context, group
        publish, replay = self._sockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        super().__init__(publish, replay)
        self._endpoints = [endpoint_of(socket) for socket in (publish, replay)]
        self.sequence = 0
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

    async def tell(self, *events: EngineEvent, dp_rank: int | None = 0, is_heard: bool = True) -> None:
        payload = encode_payload(1.0, events, dp_rank or 0)
        self.ring[self.sequence] = payload if dp_rank is not None else payload[:-1] + b"\xc0"
        if is_heard:
            await self.live(self.sequence)
        self.sequence += 1

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
async def publishing(context: zmq.asyncio.Context, n: int = 1) -> AsyncIterator[list[Publisher]]:
    async with asyncio.TaskGroup() as group:
        publishers = [Publisher(context, group) for _ in range(n)]
        yield publishers
        for each in publishers:
            each.die()


@asynccontextmanager
async def agent_of(
    log: EventLog,
    context: zmq.asyncio.Context,
    publishers: dict[Origin, Publisher],
    *,
    dp_ranks: Sequence[int] = (0,),
    has_replay: bool = True,
) -> AsyncIterator[Agent]:
    """A consolidator that has subscribed to all of them."""
    at = [
        PublisherAddress(origin, endpoint_of(each.publish), endpoint_of(each.replay) if has_replay else "")
        for origin, each in publishers.items()
    ]
    async with running_agent(log, consolidator_on(log, context, *at, dp_ranks=tuple(dp_ranks))) as agent:
        for each in publishers.values():
            await each.subscribed()
        yield agent


async def until_all_read(agent: Agent, *publishers: Publisher) -> None:
    for reader, publisher in zip(agent.consolidator.readers, publishers, strict=True):
        await eventually(lambda: reader.cursor.expected == publisher.sequence)  # noqa: B023 - awaited in its turn


# ---------------------------------------------------------------- two sources


# ---------------------------------------------------------------- publishers that begin anew


@pytest.mark.parametrize("told_before", [0, 1, 5])
@pytest.mark.parametrize("told_after", [0, 1, 9])
async def test_a_publisher_that_begins_anew_on_its_endpoint_is_noticed_and_had_whole(
    broker: Broker, log: EventLog, told_before: int, told_after: int
) -> None:
    async with (
        zmq_context() as context,
        publishing(context) as (engine,),
        running_index(broker.url) as index,
        agent_of(log, context, {ENGINE: engine}) as agent,
    ):
        for block in range(1, told_before + 1):
            await engine.tell(stored(block))
        await until_all_read(agent, engine)
        await engine.begin_anew()
        for block in range(101, 101 + told_after):
            await engine.tell(stored(block))
        await eventually(lambda: agent.cursor.restarts_total == (told_before > 0))  # until then it may look all read
        await until_all_read(agent, engine)
        await eventually(lambda: agent.cursor.is_settled)
        told = {hashes_of(block)[0] for block in range(101, 101 + told_after)}
        await eventually(lambda: set(tiers(agent)) == told)
        assert agent.cursor.restarts_total == (told_before > 0)
        await until_converged(index, agent)


async def test_without_replay_a_new_life_that_continues_the_count_is_noticed_by_its_connection(log: EventLog) -> None:
    async with (
        zmq_context() as context,
        publishing(context) as (engine,),
        agent_of(log, context, {ENGINE: engine}, has_replay=False) as agent,
    ):
        for block in range(1, 6):
            await engine.tell(stored(block))
        await until_all_read(agent, engine)
        await engine.begin_anew()
        engine.sequence = 5
        await engine.tell(stored(101))
        await eventually(lambda: set(tiers(agent)) == {hashes_of(101)[0]})
        assert agent.cursor.restarts_total == 1


@pytest.mark.parametrize("has_replay", [False, True])
async def test_a_publisher_that_is_not_there_is_told_as_a_reason_until_it_is(log: EventLog, has_replay: bool) -> None:
    async with (
        zmq_context() as context,
        publishing(context) as (engine,),
        agent_of(log, context, {ENGINE: engine}, has_replay=has_replay) as agent,
    ):
        await engine.tell(stored(1))
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
    at = PublisherAddress(ENGINE, f"tcp://127.0.0.1:{port}")
    async with server, zmq_context() as context:
        with capture_logs() as lines:
            async with running_agent(log, consolidator_on(log, context, at)) as agent:
                reason = f"no events: engine: publisher {at.endpoint} cannot be reached"
                await eventually(lambda: agent.consolidator.stale(0) == reason and accepted >= 8)
        assert [line["event"] for line in lines].count("publisher_disconnected") == 1
