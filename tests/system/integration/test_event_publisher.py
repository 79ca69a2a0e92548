"""A publisher of any source, on real sockets: what it polls is what is read, and a replay loses nothing."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from kv_protocol.events import Tier
from kv_runtime.supervise import Part, run_parts, thread_part
from tests.system.integration.broker import eventually
from worker_agent.engines.types import EngineError
from worker_agent.events.dialects.batches import BatchDecoder
from worker_agent.events.dialects.engine_wire import REPLAY_END, encode_sequence, split_frames, split_replay
from worker_agent.events.engine_events import EngineBatch, EngineCleared, EngineRemoved, EngineStored, RankEvent
from worker_agent.events.publisher import EventPublisher, ReplayRing, ReplayServer, Source
from worker_agent.events.relearning import Drained

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


class ScriptedPolls:
    """A source whose polls bring what a test says, or fail; then nothing, until it says more."""

    def __init__(self) -> None:
        self._polls: deque[list[RankEvent] | EngineError] = deque()
        self._changed = threading.Condition()

    def say(self, *polls: list[RankEvent] | EngineError) -> None:
        with self._changed:
            self._polls.extend(polls)
            self._changed.notify()

    def poll(self, timeout_s: float) -> list[RankEvent]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._polls), timeout_s)
            polled = self._polls.popleft() if self._polls else []
        if isinstance(polled, EngineError):
            raise polled
        return polled


@asynccontextmanager
async def running_publisher(source: Source) -> AsyncIterator[tuple[EventPublisher, zmq.asyncio.Socket]]:
    """The publisher runs once the reader has subscribed."""
    context, stop = zmq.asyncio.Context(), asyncio.Event()
    publisher = EventPublisher(
        source,
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
    async with running_publisher(Source(source.poll)) as (publisher, reader):
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
async def test_a_poll_of_more_than_half_the_buffer_is_followed_by_others_before_anything_is_encoded() -> None:
    polls = ScriptedPolls()
    async with running_publisher(Source(polls.poll, buffer_events=10)) as (publisher, _):
        await publisher.barrier()
        polls.say([RankEvent(0, REMOVAL)] * 6, [RankEvent(0, REMOVAL)] * 3, [], [RankEvent(0, REMOVAL)])
        await publisher.barrier()
        await publisher.barrier()
        decoder = BatchDecoder()
        batches = [decoder.decode(*entry) for entry in publisher.ring.since(0)]
        assert [len(batch.events) for batch in batches] == [9, 1]
        assert (publisher.drain.statistics().pressed_cycles_total, publisher.drain.statistics().largest_ratio) == (
            1,
            0.6,
        )


@pytest.mark.asyncio
async def test_no_message_is_too_large_to_be_read_however_much_a_poll_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.events.dialects.engine_wire.PART_NUMBERS_MAX", 10)
    source, decoder = ScriptedSource(), BatchDecoder()
    async with running_publisher(Source(source.poll)) as (publisher, _):
        await publisher.barrier()
        source.say(*[RankEvent(0, HOST_STORE)] * 8)
        await eventually(lambda: sum(len(decoder.decode(*each).events) for each in publisher.ring.since(0)) == 8)
        assert [len(decoder.decode(*each).events) for each in publisher.ring.since(0)] == [3, 3, 2]


@pytest.mark.asyncio
async def test_a_source_that_cannot_be_polled_is_polled_again_and_says_so_meanwhile() -> None:
    polls = ScriptedPolls()
    async with running_publisher(Source(polls.poll, buffer_events=2)) as (publisher, _):
        await publisher.barrier()
        with capture_logs() as lines:
            polls.say(EngineError("the engine is busy"), EngineError("the engine is busy"))
            await eventually(lambda: publisher.failure == "cannot be polled: the engine is busy")
            polls.say(
                [RankEvent(0, REMOVAL)], [RankEvent(0, REMOVAL)] * 2, EngineError("and now"), [RankEvent(0, REMOVAL)]
            )
            await eventually(lambda: publisher.poll_failures_total == 3)
            await publisher.barrier()
        decoder = BatchDecoder()
        assert [len(decoder.decode(*each).events) for each in publisher.ring.since(0)] == [1, 2, 1]
        assert publisher.failure == ""
    assert [line["event"] for line in lines] == ["source_not_polled"] * 2


@pytest.mark.asyncio
async def test_when_the_source_ran_dry_it_is_said_up_to_which_message_and_after_which_losses() -> None:
    lost: dict[int, int] = {}
    polls = ScriptedPolls()

    def translate(events: list[RankEvent]) -> list[RankEvent]:
        lost[0] = lost.get(0, 0) + sum(event.event == EngineCleared() for event in events)
        return events

    async with running_publisher(Source(polls.poll, translate, buffer_events=100, events_lost=lost)) as (publisher, _):
        await publisher.barrier()
        polls.say([RankEvent(0, REMOVAL)])
        await eventually(lambda: publisher.drained == Drained(1, {0: 0}))
        polls.say([RankEvent(0, EngineCleared())], [RankEvent(0, REMOVAL), RankEvent(0, EngineCleared())])
        await eventually(lambda: publisher.drained == Drained(3, {0: 2}))
        assert not publisher.drain.is_pressed


@pytest.mark.asyncio
@pytest.mark.parametrize("server_hwm", [1, 1000])
@pytest.mark.parametrize("reader_hwm", [1, 1000])
async def test_a_replay_of_more_messages_than_any_queue_takes_is_whole(
    monkeypatch: pytest.MonkeyPatch, server_hwm: int, reader_hwm: int
) -> None:
    """Small messages: queues are filled by their number, not by their bytes."""
    monkeypatch.setattr("worker_agent.events.publisher.REPLAY_HWM_MESSAGES", server_hwm)
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
