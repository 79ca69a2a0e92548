"""The event path to a real log: a scripted engine that is polled, engines that publish, played sockets, a reader."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import cast

import nats
import zmq
import zmq.asyncio

from bench.capture.payloads import encode_payload
from indexer.embedded import EmbeddedIndex
from indexer.follow.follower import FollowerLimits
from kv_protocol import codec, subjects
from kv_protocol.events import Batch, Tier
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from kv_runtime.clock import Clock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Restarts
from tests.support.parts import at_work
from tests.system.integration import index_on_log
from tests.system.integration.broker import eventually
from tests.system.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine, tokens_of
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.batches import REPLAY_END, encode_sequence
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.engine_events import EngineStored, RankEvent
from worker_agent.events.source_cursor import SourceCursor
from worker_agent.events.source_poller import Source, SourcePoller

MODEL, WORKER = "sim-8b", "w0"
RANK = WorkerRank(WORKER, 0)
NATS = NatsSection(events_max_bytes=1 << 26)
OUTBOX_BYTES = 64 << 20
LIMITS = FollowerLimits(behind_s=0.3, answer_s=0.5)
PATIENT = Restarts(failures_max=100, pause_s=0.0)
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

    def held(self) -> set[HeldBlock]:
        return set(self.consolidator.core.mirrors[0].dump())

    def tiers(self) -> dict[int, tuple[Tier, ...]]:
        """Return where each block that rank 0 holds is."""
        return {block.sequence_hash: tuple(block.tiers) for block in self.held()}

    async def until_read(self, sequence: int) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.consolidator.readers[0].until_read(sequence)

    async def until_published(self) -> None:
        """Return once the log took all there is."""
        await eventually(
            lambda: not any(self.consolidator.core.outboxes[r].unacked_bytes for r in self.consolidator.core.dp_ranks)
        )


@dataclass
class PolledAgent(Agent):
    """The whole path of an agent that polls an engine."""

    engine: ScriptedEngine = field(kw_only=True)

    @property
    def poller(self) -> SourcePoller:
        assert self.consolidator.poller is not None
        return self.consolidator.poller

    @property
    def stale(self) -> str:
        return self.consolidator.stale(0)

    def holds(self, *blocks: int) -> bool:
        """Return whether rank 0 holds this chain, and nothing else."""
        return set(self.tiers()) == set(hashes_of(*blocks))

    async def position(self) -> dict[int, tuple[int, int]]:
        """Return the position once all that the engine had said before is in the ranks' streams."""
        await eventually(lambda: self.engine.is_polled_dry)
        async with asyncio.timeout(WAIT_S):
            return await self.consolidator.position()


@asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def event_path(
    log: EventLog,
    *readers: EngineEventSubscriber,
    source: Source | None = None,
    dp_ranks: tuple[int, ...] = (0,),
    outbox_bytes: int = OUTBOX_BYTES,
) -> Consolidator:
    """Return the consolidator of a worker, of which nothing runs; the epochs are 100, 101 and so on."""
    origins = [*([] if source is None else [SOLE]), *(each.origin for each in readers)]
    core = Consolidation(dp_ranks, BLOCK_SIZE, "i", count(100).__next__, origins=origins)
    for outbox in core.outboxes.values():
        outbox.bytes_max = outbox_bytes
    return Consolidator(
        core,
        readers,
        log,
        Clock(),
        model=MODEL,
        worker_id=WORKER,
        source=source,
        poll_s=0.01,
        restarts=PATIENT,
    )


@asynccontextmanager
async def running(path: Consolidator, *, stop: asyncio.Event | None = None) -> AsyncIterator[None]:
    await path.start()
    async with at_work(*path.parts(0), stop=stop):
        yield


@asynccontextmanager
async def polled_agent(
    log: EventLog, engine: ScriptedEngine, *readers: EngineEventSubscriber, outbox_bytes: int = OUTBOX_BYTES
) -> AsyncIterator[PolledAgent]:
    """An agent that polls the engine and reads further publishers, with all its parts."""
    source = Source(lambda work, timeout_s: work.call(partial(engine.kv_events, timeout_s)), TrtllmRules(BLOCK_SIZE))
    path = event_path(log, *readers, source=source, outbox_bytes=outbox_bytes)
    agent = PolledAgent(log, path, engine=engine)
    async with running(path, stop=agent.stop):
        yield agent


@asynccontextmanager
async def subscribed_agent(
    log: EventLog, context: zmq.asyncio.Context, publish: str, replay: str = ""
) -> AsyncIterator[Agent]:
    """An agent of an engine that publishes its events there; without `replay` lost ones do not come back."""
    at = PublisherAddress(SOLE, publish, replay)
    reader = EngineEventSubscriber(at, context, Clock())
    reader.answer_s, reader.cursor.idle_s = 0.5, 0.2
    path = event_path(log, reader)
    async with running(path):
        yield Agent(log, path)


@asynccontextmanager
async def running_index(url: str) -> AsyncIterator[EmbeddedIndex]:
    """The reader: a real index, in real time."""
    async with index_on_log.running_index(url, Clock(), nats=NATS, limits=LIMITS) as running:
        yield running.index


async def until_converged(index: EmbeddedIndex, agent: Agent) -> None:
    """Return once the index is where the consolidator is; it then holds the same."""
    outbox = agent.consolidator.core.outboxes[0]
    async with asyncio.timeout(WAIT_S):
        await index.wait_for(RANK, outbox.epoch, outbox.last_seq)
    assert set(index.held(RANK)) == agent.held()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[EventLog]:
    log = await EventLog.connect(url, name="test")
    try:
        yield log
    finally:
        await log.close()


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
    topic: tuple[bytes, ...] = (b"",)
    """The frame that answers have before the sequence, or none."""
    sequence: int = 0
    """Of the message that is added next."""

    async def send(self, *frames: bytes) -> None:
        await self.publish.send_multipart(frames)

    async def live(self, sequence: int) -> None:
        await self.send(b"", encode_sequence(sequence), self.ring[sequence])

    async def add(self, payload: bytes) -> None:
        """Publish one more message, which replays bring, too."""
        self.ring[self.sequence] = payload
        await self.live(self.sequence)
        self.sequence += 1

    async def subscribed(self) -> None:
        """Return once somebody has subscribed."""
        async with asyncio.timeout(WAIT_S):
            while await self.publish.recv() != b"\x01":
                pass

    @property
    def flags(self) -> tuple[str, ...]:
        """What an agent is told of the addresses; of several ranks, those of the first."""
        return ("--kv-events", endpoint_of(self.publish), "--replay-endpoint", endpoint_of(self.replay))

    async def serve(self) -> None:
        """Answer replays until cancelled."""
        while True:
            identity, _, start = await self.replay.recv_multipart()
            for sequence, payload in sorted(self.ring.items()):
                if sequence >= int.from_bytes(start, "big"):
                    await self.replay.send_multipart([identity, b"", *self.topic, encode_sequence(sequence), payload])
            await self.replay.send_multipart([identity, b"", *self.topic, encode_sequence(REPLAY_END), b""])


def endpoint_of(socket: zmq.asyncio.Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def bound_in_a_row(context: zmq.asyncio.Context, kind: int, count: int) -> list[zmq.asyncio.Socket]:
    """Return so many sockets on consecutive ports."""
    while True:
        sockets = [context.socket(kind) for _ in range(count)]
        sockets[0].bind("tcp://127.0.0.1:*")
        host, _, first = endpoint_of(sockets[0]).rpartition(":")
        try:
            for at, socket in enumerate(sockets[1:], 1):
                socket.bind(f"{host}:{int(first) + at}")
        except zmq.ZMQError:  # another process has the port
            for socket in sockets:
                socket.close(linger=0)
            continue
        return sockets


@asynccontextmanager
async def playing(
    context: zmq.asyncio.Context, ranks: int = 1, *, topic: tuple[bytes, ...] = (b"",)
) -> AsyncIterator[list[PlayedSource]]:
    """A publisher a rank, on consecutive ports, whose replays are answered; vLLM's answers have no topic: `()`."""
    pairs = zip(*(bound_in_a_row(context, kind, ranks) for kind in (zmq.XPUB, zmq.ROUTER)), strict=True)
    sources = [PlayedSource(publish, replay, topic=topic) for publish, replay in pairs]
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(each.serve()) for each in sources]
        yield sources
        for task in serving:
            task.cancel()
    for each in sources:
        each.publish.close(linger=0)
        each.replay.close(linger=0)


@asynccontextmanager
async def played(log: EventLog) -> AsyncIterator[tuple[PlayedSource, Agent]]:
    """A consolidator that has subscribed to sockets which the test plays."""
    async with (
        zmq_context() as context,
        playing(context) as (source,),
        subscribed_agent(log, context, endpoint_of(source.publish), endpoint_of(source.replay)) as agent,
    ):
        await source.subscribed()
        yield source, agent


def stored(*blocks: int, parent: int | None = None) -> bytes:
    event = EngineStored(
        block_hashes=blocks, parent_block_hash=parent, token_ids=tuple(tokens_of(blocks)), block_size=BLOCK_SIZE
    )
    return encode_payload(1.0, [event], 0)


def chain_payloads(n: int) -> dict[int, bytes]:
    return {at: stored(at + 1, parent=at or None) for at in range(n)}


class TranslatedEvents(TrtllmRules):
    """The rules of a source that reports translated events."""

    def __init__(self) -> None:
        super().__init__(1)

    def translate(self, engine_events: object) -> list[RankEvent]:
        """Return the events as they are."""
        return cast("list[RankEvent]", engine_events)
