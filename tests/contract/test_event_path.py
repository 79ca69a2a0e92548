"""What an engine's events become in its ranks' streams is the same, polled in this process or published over ZeroMQ."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import psutil
import pytest
import pytest_asyncio
import zmq.asyncio
from msgspec.structs import replace

from bench.capture.payloads import encode_payload
from indexer.embedded import ensure_streams
from kv_protocol.events import Batch, Cleared, Removed, Stored, Tier
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import SupervisedWork
from tests.system.integration.broker import WAIT_S, Broker, eventually
from tests.system.integration.event_path import (
    NATS,
    PlayedSource,
    TranslatedEvents,
    batches_in,
    connected,
    endpoint_of,
    event_path,
    hashes_of,
    playing,
    running,
    zmq_context,
)
from tests.system.integration.scripted_engine import BLOCK_SIZE, tokens_of
from worker_agent.events.consolidation import SOLE, PublisherState
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored, RankEvent
from worker_agent.events.source_poller import Source

DP_RANKS = (0, 1)


class PolledEngine:
    """Polled in this process; a poll that fails unexpectedly loses what it took."""

    def __init__(self, log: EventLog) -> None:
        self._told = asyncio.Queue[list[RankEvent] | None]()
        self.path = event_path(log, source=Source(self._take, TranslatedEvents()), dp_ranks=DP_RANKS)

    async def _take(self, _: SupervisedWork, timeout_s: float) -> list[RankEvent]:
        taken: list[RankEvent] | None = []
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                taken = await self._told.get()
        if taken is None:
            raise ZeroDivisionError("the engine's own")
        return taken

    async def tell(self, *events: EngineEvent, dp_rank: int = 0) -> None:
        self._told.put_nowait([RankEvent(dp_rank, event) for event in events])

    async def lose(self) -> None:
        self._told.put_nowait(None)

    async def until_read(self) -> None:
        await eventually(self._told.empty)
        async with asyncio.timeout(WAIT_S):
            await self.path.position()


class PublishingEngine:
    """Publishes over ZeroMQ, with replays; what is lost is in no replay either."""

    def __init__(self, log: EventLog, context: zmq.asyncio.Context, source: PlayedSource) -> None:
        self._source = source
        at = PublisherAddress(SOLE, endpoint_of(source.publish), endpoint_of(source.replay))
        self.path = event_path(log, EngineEventSubscriber(at, context, Clock()), dp_ranks=DP_RANKS)

    async def tell(self, *events: EngineEvent, dp_rank: int = 0) -> None:
        await self._source.add(encode_payload(1.5, events, dp_rank))

    async def lose(self) -> None:
        self._source.sequence += 1

    async def until_read(self) -> None:
        (reader,) = self.path.readers
        async with asyncio.timeout(WAIT_S):
            await reader.until_read(self._source.sequence)


Engine = PolledEngine | PublishingEngine
StartEngine = Callable[[EventLog], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def polled(log: EventLog) -> AsyncIterator[Engine]:
    engine = PolledEngine(log)
    async with running(engine.path):
        yield engine


@asynccontextmanager
async def published(log: EventLog) -> AsyncIterator[Engine]:
    async with zmq_context() as context, playing(context, topic=()) as (source,):
        engine = PublishingEngine(log, context, source)
        async with running(engine.path):
            await source.subscribed()
            yield engine


@pytest_asyncio.fixture
async def log(broker: Broker) -> AsyncIterator[EventLog]:
    async with connected(broker.url) as connection:
        await ensure_streams(connection, NATS)
        yield connection


@pytest.fixture(params=[polled, published])
def start(request: pytest.FixtureRequest) -> StartEngine:
    way: StartEngine = request.param
    return way


def stored(
    *blocks: int, parent: int | None = None, tier: Tier = Tier.GPU, block_size: int = BLOCK_SIZE
) -> EngineStored:
    return EngineStored(
        block_hashes=blocks,
        parent_block_hash=parent,
        token_ids=tuple(tokens_of(blocks)) * (block_size // BLOCK_SIZE),
        block_size=block_size,
        tier=tier,
    )


def held(engine: Engine, dp_rank: int = 0) -> set[int]:
    return {block.sequence_hash for block in engine.path.core.mirrors[dp_rank].dump()}


def counted(engine: Engine) -> PublisherState:
    (state,) = engine.path.core.publishers.values()
    return state


async def in_log(engine: Engine, url: str) -> list[Batch]:
    core = engine.path.core
    await eventually(lambda: not any(core.outboxes[rank].unacked_bytes for rank in core.dp_ranks))
    return await batches_in(url)


async def test_events_are_in_the_log_in_their_order_with_their_batch_s_sequence(
    start: StartEngine, broker: Broker, log: EventLog
) -> None:
    async with start(log) as engine:
        await engine.tell(stored(1, 2), stored(3, parent=2))
        await engine.tell(EngineRemoved(block_hashes=(3,)))
        await engine.tell(replace(stored(4, parent=1, tier=Tier.HOST), block_hashes=(2**64 - 1,)))
        await engine.tell(EngineRemoved(block_hashes=(2**64 - 1,), tier=Tier.HOST))
        await engine.until_read()
        batches = await in_log(engine, broker.url)
    (one, two, three), four = hashes_of(1, 2, 3), hashes_of(1, 4)[1]
    assert [(batch.epoch, batch.seq, batch.source_seq, batch.event) for batch in batches] == [
        (100, 1, 0, Stored((one, two))),
        (100, 2, 0, Stored((three,), two, 2)),
        (100, 3, 1, Removed((three,))),
        (100, 4, 2, Stored((four,), one, 1, Tier.HOST)),
        (100, 5, 3, Removed((four,), Tier.HOST)),
    ]


async def test_every_rank_has_a_stream_of_its_own(start: StartEngine, log: EventLog) -> None:
    async with start(log) as engine:
        await engine.tell(stored(1, 2))
        await engine.tell(stored(1), dp_rank=1)
        await engine.until_read()
        assert await engine.path.position() == {0: (100, 1), 1: (101, 1)}
        assert (held(engine), held(engine, 1)) == (set(hashes_of(1, 2)), set(hashes_of(1)))


async def test_a_loss_removes_the_source_s_blocks_once_and_what_follows_is_learnt(
    start: StartEngine, broker: Broker, log: EventLog
) -> None:
    async with start(log) as engine:
        await engine.tell(stored(1))
        await engine.tell(stored(1), dp_rank=1)
        await engine.until_read()
        await engine.lose()
        await engine.tell(stored(2))
        await engine.until_read()
        assert (held(engine), held(engine, 1)) == (set(hashes_of(2)), set())
        assert counted(engine).losses_total == 1
        batches = await in_log(engine, broker.url)
        await eventually(lambda: engine.path.stale(0) == "")
    of_rank_0 = [(batch.source_seq, batch.event) for batch in batches if batch.epoch == 100]
    assert of_rank_0 == [(0, Stored(tuple(hashes_of(1)))), (0, Cleared(Tier.GPU)), (3, Stored(tuple(hashes_of(2))))]


async def test_events_of_a_rank_that_the_worker_does_not_have_are_counted_and_dropped(
    start: StartEngine, log: EventLog
) -> None:
    async with start(log) as engine:
        await engine.tell(stored(1), dp_rank=7)
        await engine.tell(stored(2))
        await engine.until_read()
        assert counted(engine).foreign_rank_batches_total == 1
        assert held(engine) == set(hashes_of(2))


async def test_blocks_of_another_size_make_the_rank_stale_until_it_is_cleared(
    start: StartEngine, log: EventLog
) -> None:
    async with start(log) as engine:
        await engine.tell(stored(1, block_size=2 * BLOCK_SIZE), stored(2))
        await engine.until_read()
        assert engine.path.stale(0) == f"engine: block_size: found {2 * BLOCK_SIZE}, allowed {BLOCK_SIZE}"
        assert (held(engine), engine.path.stale(1)) == (set(hashes_of(2)), "")
        await engine.tell(EngineCleared())
        await engine.until_read()
        assert (engine.path.stale(0), held(engine)) == ("", set())


async def test_what_was_told_last_is_in_the_log_after_a_stop(start: StartEngine, broker: Broker, log: EventLog) -> None:
    async with start(log) as engine:
        await engine.tell(stored(1))
        await engine.until_read()
        await engine.tell(*(stored(block) for block in range(2, 201)))
    assert held(engine) == {hashes_of(block)[0] for block in range(1, 201)}
    assert [batch.seq for batch in await batches_in(broker.url)] == list(range(1, 201))


async def test_an_engine_that_is_polled_needs_no_socket(log: EventLog) -> None:
    before = {each.laddr for each in psutil.Process().net_connections("all")}
    async with polled(log) as engine:
        await engine.tell(stored(1))
        await engine.until_read()
        assert {each.laddr for each in psutil.Process().net_connections("all")} - before == set()
