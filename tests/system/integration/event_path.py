"""Hop A and what reads it, on real sockets: our publisher on a scripted engine, sockets that a test plays, a reader."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import nats
import zmq
import zmq.asyncio

from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_protocol import codec, subjects
from kv_protocol.events import Batch
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, run_parts, thread_part
from tests.system.integration.broker import eventually
from tests.system.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine, tokens_of
from worker_agent.events.consolidation import SOLE, Consolidation, Origin
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.engine_wire import REPLAY_END, encode_payload, encode_sequence
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber
from worker_agent.events.engine_events import EngineStored
from worker_agent.events.publisher import EventPublisher, ReplayServer, Source
from worker_agent.events.recoveries import CHUNK_BLOCKS
from worker_agent.events.source_cursor import SourceCursor

MODEL, WORKER = "sim-8b", "w0"
RANK = WorkerRank(WORKER, 0)
NATS = NatsSection(events_max_bytes=1 << 26)
RING_BYTES = 64 << 20
OUTBOX_BYTES = 64 << 20
WAIT_S = 20.0


def hashes_of(*blocks: int) -> list[int]:
    return sequence_hashes(tokens_of(blocks), BLOCK_SIZE)


@dataclass
class Agent:
    """A consolidator on its way from a publisher (ours, or a test's sockets) to the log."""

    log: EventLog
    consolidator: Consolidator
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cursor(self) -> SourceCursor:
        return self.consolidator.readers[0].cursor

    def last_seq(self, dp_rank: int = 0) -> int:
        return self.consolidator.core.outbox(dp_rank).last_seq

    def epoch(self, dp_rank: int = 0) -> int:
        return self.consolidator.core.outbox(dp_rank).epoch

    def held(self, dp_rank: int = 0) -> set[HeldBlock]:
        return {block for chunk in self.consolidator.core.dump(dp_rank, 0) for block in chunk.blocks()}

    async def until_read(self, sequence: int) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.consolidator.readers[0].until_read(sequence)

    async def until_published(self) -> None:
        """Return once the log took all there is."""
        await eventually(
            lambda: not any(self.consolidator.core.outbox(r).waiting_bytes for r in self.consolidator.core.dp_ranks)
        )


@dataclass
class ScriptedSource:
    """Our publisher on a scripted engine."""

    engine: ScriptedEngine
    rules: TrtllmRules
    publisher: EventPublisher
    replay: ReplayServer

    async def position(self, agent: Agent) -> dict[int, tuple[int, int]]:
        """Return the agent's position after all that was emitted before."""
        await eventually(lambda: self.engine.is_polled_dry)
        async with asyncio.timeout(WAIT_S):
            return await agent.consolidator.position(await self.publisher.barrier())


@dataclass(frozen=True)
class PublishedAt:
    """Where a publisher is, and what it speaks for; without `replay` it has none."""

    publish: str
    replay: str = ""
    origin: Origin = SOLE


def consolidator_on(
    log: EventLog,
    context: zmq.asyncio.Context,
    *publishers: PublishedAt,
    dp_ranks: tuple[int, ...] = (0,),
    epoch: int = 100,
    outbox_bytes: int = OUTBOX_BYTES,
    chunk_blocks: int = CHUNK_BLOCKS,
    source_stale: Callable[[int], str] | None = None,
) -> Consolidator:
    epochs = iter(range(epoch, epoch + 100))
    origins = [each.origin for each in publishers]
    core = Consolidation(
        dp_ranks,
        BLOCK_SIZE,
        "i",
        lambda: next(epochs),
        origins=origins,
        outbox_bytes_max=outbox_bytes,
        chunk_blocks=chunk_blocks,
    )
    readers = [
        EngineEventSubscriber(
            each.origin,
            SourceCursor(has_replay=bool(each.replay), idle_s=0.2),
            context,
            SystemClock(),
            publish_endpoint=each.publish,
            replay_endpoint=each.replay,
            answer_s=0.5,
        )
        for each in publishers
    ]
    return Consolidator(
        core,
        readers,
        log,
        SystemClock(),
        model=MODEL,
        worker_id=WORKER,
        source_stale=source_stale,
    )


def publisher_on(
    context: zmq.asyncio.Context, engine: ScriptedEngine, rules: TrtllmRules, *, ring_bytes: int = RING_BYTES
) -> EventPublisher:
    return EventPublisher(
        Source(engine.kv_events, rules.translate, stale=rules.stale, events_lost=rules.events_lost),
        zmq.Context(context),
        ring_bytes_max=ring_bytes,
        poll_s=0.01,
        wall_ns=SystemClock().wall_ns,
    )


@asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def running_source(
    context: zmq.asyncio.Context, engine: ScriptedEngine, *, ring_bytes: int = RING_BYTES
) -> AsyncIterator[ScriptedSource]:
    """Our publisher and replay server run, before anybody subscribes."""
    rules = TrtllmRules(engine.describe().block_size)
    publisher = publisher_on(context, engine, rules, ring_bytes=ring_bytes)
    replay, stop = ReplayServer(publisher.ring, context), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        parts = [thread_part("kv-events", publisher.run), Part("replay", replay.run, 1)]
        group.create_task(run_parts(parts, stop=stop, drain_s=5.0))
        yield ScriptedSource(engine, rules, publisher, replay)
        stop.set()


@asynccontextmanager
async def running_agent(log: EventLog, consolidator: Consolidator) -> AsyncIterator[Agent]:
    agent = Agent(log, consolidator)
    await consolidator.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_parts(consolidator.parts(0), stop=agent.stop, drain_s=5.0))
        yield agent
        agent.stop.set()


@asynccontextmanager
async def running_index(url: str) -> AsyncIterator[EmbeddedIndex]:
    """The reader: a real index."""
    stop = asyncio.Event()
    async with connected(url) as log:
        await ensure_streams(log, NATS)
        index = EmbeddedIndex(IndexSection(behind_s=0.3, answer_s=0.5), log, SystemClock())
        await index.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(run_parts(index.parts(0), stop=stop, drain_s=5.0))
            yield index
            stop.set()


async def until_converged(index: EmbeddedIndex, agent: Agent, dp_rank: int = 0) -> None:
    """Return once the index is where the consolidator is; it then holds the same."""
    async with asyncio.timeout(WAIT_S):
        await index.wait_for(WorkerRank(WORKER, dp_rank), agent.epoch(dp_rank), agent.last_seq(dp_rank))
    assert set(index.held(WorkerRank(WORKER, dp_rank))) == agent.held(dp_rank)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[EventLog]:
    log = await EventLog.connect(url, name="test")
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def everything(
    log: EventLog,
    engine: ScriptedEngine,
    *,
    ring_bytes: int = RING_BYTES,
    outbox_bytes: int = OUTBOX_BYTES,
    chunk_blocks: int = CHUNK_BLOCKS,
) -> AsyncIterator[tuple[ScriptedSource, Agent]]:
    """Our publisher and a consolidator on it."""
    async with AsyncExitStack() as cleanup:
        context = await cleanup.enter_async_context(zmq_context())
        source = await cleanup.enter_async_context(running_source(context, engine, ring_bytes=ring_bytes))
        consolidator = consolidator_on(
            log,
            context,
            PublishedAt(source.publisher.endpoint, source.replay.endpoint),
            dp_ranks=engine.describe().dp_ranks,
            outbox_bytes=outbox_bytes,
            chunk_blocks=chunk_blocks,
            source_stale=source.rules.stale,
        )
        agent = await cleanup.enter_async_context(running_agent(log, consolidator))
        yield source, agent


async def batches_in(url: str) -> list[Batch]:
    """Return all batches of the rank that the log holds, in its order."""
    client = await nats.connect(url)
    stream = client.jetstream()
    last = (await stream.stream_info(subjects.EVENTS_STREAM)).state.last_seq
    batches = []
    for seq in range(1, last + 1):
        message = await stream.get_msg(subjects.EVENTS_STREAM, seq)
        assert message.data is not None
        batches += codec.decode_message(message.data)
    await client.close()
    return batches


@dataclass
class PlayedSource:
    """The engine side of hop A, frame by frame; `ring` is what replays bring."""

    publish: zmq.asyncio.Socket
    replay: zmq.asyncio.Socket
    ring: dict[int, bytes] = field(default_factory=dict)
    noise: tuple[list[bytes], ...] = ()
    topic: tuple[bytes, ...] = (b"",)
    """The frame that answers have before the sequence, or none."""
    replays_asked: list[int] = field(default_factory=list)

    async def send(self, *frames: bytes) -> None:
        await self.publish.send_multipart(frames)

    async def live(self, sequence: int) -> None:
        await self.send(b"", encode_sequence(sequence), self.ring[sequence])

    async def serve(self) -> None:
        """Answer replays until cancelled."""
        while True:
            identity, _, start = await self.replay.recv_multipart()
            self.replays_asked.append(int.from_bytes(start, "big"))
            for frames in self.noise:
                await self.replay.send_multipart([identity, *frames])
            for sequence in sorted(self.ring):
                if sequence >= self.replays_asked[-1]:
                    await self.replay.send_multipart(
                        [identity, b"", *self.topic, encode_sequence(sequence), self.ring[sequence]]
                    )
            await self.replay.send_multipart([identity, b"", *self.topic, encode_sequence(REPLAY_END), b""])


def endpoint_of(socket: zmq.asyncio.Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


@asynccontextmanager
async def played(log: EventLog) -> AsyncIterator[tuple[PlayedSource, Agent]]:
    """A consolidator that has subscribed to sockets which the test plays."""
    async with zmq_context() as context:
        publish, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        for socket in (publish, replay):
            socket.bind("tcp://127.0.0.1:*")
        source = PlayedSource(publish, replay)
        at = PublishedAt(endpoint_of(publish), endpoint_of(replay))
        async with running_agent(log, consolidator_on(log, context, at)) as agent, asyncio.TaskGroup() as group:
            serving = group.create_task(source.serve())
            async with asyncio.timeout(WAIT_S):
                assert await publish.recv() == b"\x01"
            yield source, agent
            serving.cancel()


def stored(*blocks: int, parent: int | None = None) -> bytes:
    event = EngineStored(
        block_hashes=blocks, parent_block_hash=parent, token_ids=tuple(tokens_of(blocks)), block_size=BLOCK_SIZE
    )
    return encode_payload(1.0, [event], 0)


def chain_payloads(n: int) -> dict[int, bytes]:
    return {at: stored(at + 1, parent=at or None) for at in range(n)}
