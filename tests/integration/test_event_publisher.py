"""A publisher of any source, on real sockets: what it polls is what is read, and a replay loses nothing."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from kv_protocol.events import Tier
from kv_runtime.supervise import Part, run_parts, thread_part
from worker_agent.core.dialects.batches import BatchDecoder
from worker_agent.core.dialects.hop_a import REPLAY_END, encode_sequence, split_frames, split_replay
from worker_agent.core.engine_events import EngineBatch, EngineRemoved, EngineStored, RankEvent
from worker_agent.publisher import EventPublisher, ReplayRing, ReplayServer

WAIT_S = 20.0
HOST_STORE = EngineStored(
    block_hashes=(1,), parent_block_hash=None, token_ids=(7, 8), block_size=2, tier=Tier.HOST, group_idx=1
)
NAMED_STORE = EngineStored(block_hashes=(2**64 - 1,), parent_block_hash=None, token_ids=(), block_size=0)
REMOVAL = EngineRemoved(block_hashes=(2**64 - 1,), tier=Tier.HOST)


class ScriptedSource:
    """Says what a test says; a poll takes all of it, as an engine's does."""

    def __init__(self) -> None:
        self._said: deque[RankEvent] = deque()
        self._changed = threading.Condition()

    def say(self, *events: RankEvent) -> None:
        with self._changed:
            self._said.extend(events)
            self._changed.notify()

    def poll(self, timeout_s: float) -> list[RankEvent]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._said), timeout_s)
            said = list(self._said)
            self._said.clear()
            return said


@asynccontextmanager
async def running_publisher(source: ScriptedSource) -> AsyncIterator[tuple[EventPublisher, zmq.asyncio.Socket]]:
    """The publisher runs once the reader has subscribed."""
    context, stop = zmq.asyncio.Context(), asyncio.Event()
    publisher = EventPublisher(
        source.poll,
        zmq.Context(context),
        ring_bytes_max=1 << 20,
        poll_s=0.01,
        wall_ns=lambda: 1_500_000_000,
    )
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"")
    reader.connect(publisher.endpoint)
    try:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            group.create_task(run_parts([thread_part("events", publisher.run)], stop=stop, drain_s=5.0))
            yield publisher, reader
            stop.set()
    finally:
        context.destroy(linger=0)


@pytest.mark.asyncio
async def test_each_poll_is_published_as_one_message_a_rank_in_the_order_of_its_events() -> None:
    source, decoder = ScriptedSource(), BatchDecoder()
    async with running_publisher(source) as (publisher, reader):
        said = [RankEvent(0, HOST_STORE), RankEvent(1, REMOVAL), RankEvent(0, NAMED_STORE), RankEvent(0, REMOVAL)]
        while not await reader.poll(timeout=10):  # until the subscription is there
            source.say(RankEvent(0, REMOVAL))
        before = await publisher.barrier()
        source.say(*said)
        assert await publisher.barrier() == before + 2
        batches: list[EngineBatch] = []
        while len(batches) < 2:
            sequence, payload = split_frames(await reader.recv_multipart())
            if sequence >= before:
                batches.append(decoder.decode(sequence, payload))
    assert [(batch.sequence, batch.dp_rank, batch.time_s, batch.events) for batch in batches] == [
        (before, 0, 1.5, (HOST_STORE, NAMED_STORE, REMOVAL)),
        (before + 1, 1, 1.5, (REMOVAL,)),
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("server_hwm", [1, 1000])
@pytest.mark.parametrize("reader_hwm", [1, 1000])
async def test_a_replay_of_more_messages_than_any_queue_takes_is_whole(
    monkeypatch: pytest.MonkeyPatch, server_hwm: int, reader_hwm: int
) -> None:
    """Small messages: queues are filled by their number, not by their bytes."""
    monkeypatch.setattr("worker_agent.publisher._REPLAY_HWM_MESSAGES", server_hwm)
    ring, messages, stop = ReplayRing(1 << 30), 3000, asyncio.Event()
    for sequence in range(messages):
        ring.add(sequence, sequence.to_bytes(4, "big"))
    context, replayed = zmq.asyncio.Context(), []
    try:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            server, reader = ReplayServer(ring, context), context.socket(zmq.DEALER)
            group.create_task(run_parts([Part("replay", server.run)], stop=stop, drain_s=5.0))
            reader.set(zmq.RCVHWM, reader_hwm)
            reader.connect(server.endpoint)
            await reader.send_multipart([b"", encode_sequence(0)])
            while (reply := split_replay(await reader.recv_multipart()))[0] != REPLAY_END:
                replayed.append(reply)
            stop.set()
    finally:
        context.destroy(linger=0)
    assert replayed == [(sequence, sequence.to_bytes(4, "big")) for sequence in range(messages)]
    assert server.refused_total == 0
