"""A poller of any source: what it polls is what is delivered, in order, without a hole; and the queue of its thread."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from kv_protocol.events import Tier
from kv_runtime.supervise import Restarts
from tests.support.parts import at_work
from tests.system.integration.broker import eventually
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    RankEvent,
)
from worker_agent.events.poll_rules import DrainedMoment
from worker_agent.events.source_poller import Handover, Source, SourcePoller, batches_of
from worker_agent.port.types import EngineError

WAIT_S = 20.0
HOST_STORE = EngineStored(
    block_hashes=(1,), parent_block_hash=None, token_ids=(7, 8), block_size=2, tier=Tier.HOST, group_idx=1
)
NAMED_STORE = EngineStored(block_hashes=(2**64 - 1,), parent_block_hash=None, token_ids=(), block_size=0)
REMOVAL = EngineRemoved(block_hashes=(2**64 - 1,), tier=Tier.HOST)


class ScriptedPolls:
    """A source whose polls bring what a test says, or fail; then nothing, until it says more."""

    def __init__(self) -> None:
        self._polls: deque[list[RankEvent] | EngineError] = deque()
        self._changed = threading.Condition()

    def say(self, *polls: list[RankEvent] | EngineError) -> None:
        with self._changed:
            self._polls.extend(polls)
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._polls)

    def poll(self, timeout_s: float) -> list[RankEvent]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._polls), timeout_s)
            polled = self._polls.popleft() if self._polls else []
        if isinstance(polled, EngineError):
            raise polled
        return polled


@dataclass
class Delivered:
    """What a poller delivered; None: a loss."""

    poller: SourcePoller
    batches: list[EngineBatch | None] = field(default_factory=list)

    def on_batch(self, batch: EngineBatch, origin: Origin) -> None:
        assert origin == self.poller.origin
        self.batches.append(batch)

    def on_loss(self, origin: Origin) -> None:
        assert origin == self.poller.origin
        self.batches.append(None)

    @property
    def sizes(self) -> list[int]:
        return [len(batch.events) for batch in self.batches if batch is not None]


@asynccontextmanager
async def running_poller(source: Source) -> AsyncIterator[tuple[SourcePoller, Delivered]]:
    """The poller runs with both of its parts."""
    poller = SourcePoller(
        source, poll_s=0.01, wall_ns=lambda: 1_500_000_000, restarts=Restarts(failures_max=100, pause_s=0.0)
    )
    delivered = Delivered(poller)
    async with asyncio.timeout(WAIT_S), at_work(*poller.parts(delivered, 0)):
        yield poller, delivered


async def test_each_poll_is_one_batch_a_rank_in_the_order_of_its_events() -> None:
    source = ScriptedPolls()
    said = [RankEvent(0, HOST_STORE), RankEvent(1, REMOVAL), RankEvent(0, NAMED_STORE), RankEvent(0, REMOVAL)]
    async with running_poller(Source(source.poll)) as (poller, delivered):
        source.say([RankEvent(0, REMOVAL)])
        await poller.until_delivered()
        source.say(said)
        await poller.until_delivered()
        assert poller.delivered == 3
    assert delivered.batches == [
        EngineBatch(sequence=0, dp_rank=0, time_s=1.5, events=(REMOVAL,)),
        EngineBatch(sequence=1, dp_rank=0, time_s=1.5, events=(HOST_STORE, NAMED_STORE, REMOVAL)),
        EngineBatch(sequence=2, dp_rank=1, time_s=1.5, events=(REMOVAL,)),
    ]


async def test_after_an_unexpected_error_a_loss_has_the_next_sequence_and_polling_continues() -> None:
    source, errors = ScriptedPolls(), [ZeroDivisionError("unexpected")]

    def take(timeout_s: float) -> list[RankEvent]:
        taken = source.poll(timeout_s)
        if taken and errors:
            raise errors.pop()
        return taken

    async with running_poller(Source(take)) as (poller, delivered):
        source.say([RankEvent(0, REMOVAL)])
        await eventually(lambda: poller.delivered == 1)
        source.say([RankEvent(0, REMOVAL)])
        await poller.until_delivered()
        assert (poller.lost_at, poller.thread.failures_total) == (0, 1)
    assert delivered.batches == [None, EngineBatch(sequence=1, dp_rank=0, time_s=1.5, events=(REMOVAL,))]


async def test_while_the_event_loop_is_busy_the_thread_waits_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_agent.events.source_poller.WAITING_NUMBERS_MAX", 3)
    polls, stop = ScriptedPolls(), threading.Event()
    polls.say(*[[RankEvent(0, REMOVAL)]] * 20)
    poller = SourcePoller(Source(polls.poll), poll_s=0.01, wall_ns=lambda: 0)
    delivered = Delivered(poller)
    thread = threading.Thread(target=poller.run, args=(stop,))
    thread.start()
    while len(polls) > 20 - 4:  # and the event loop does nothing else
        pass
    assert len(polls) == 20 - 4
    ended = asyncio.Event()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        (_, delivery) = poller.parts(delivered, 0)
        group.create_task(delivery.run(ended))
        await eventually(lambda: poller.delivered == 20)
        stop.set()
        ended.set()
    thread.join()
    assert [batch.sequence for batch in delivered.batches if batch is not None] == list(range(20))


async def test_other_tasks_have_their_turn_between_batches() -> None:
    polls, turns = ScriptedPolls(), 0
    async with running_poller(Source(polls.poll)) as (poller, delivered):
        polls.say(*[[RankEvent(0, REMOVAL)]] * 100)
        while poller.delivered < 100:
            turns += 1
            await asyncio.sleep(0)
    assert turns >= len(delivered.batches) - 1


async def test_no_batch_holds_the_event_loop_up_for_long_however_much_a_poll_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_agent.events.source_poller.BATCH_NUMBERS_MAX", 10)
    source = ScriptedPolls()
    async with running_poller(Source(source.poll)) as (poller, delivered):
        source.say([RankEvent(0, HOST_STORE)] * 8)
        await poller.until_delivered()
        assert delivered.sizes == [3, 3, 2]


def test_events_are_parted_in_their_order_where_they_are_too_many_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.events.source_poller.BATCH_NUMBERS_MAX", 10)
    two = EngineStored(block_hashes=(1, 2), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=2)
    gone = EngineRemoved(block_hashes=(1, 2, 3, 4))
    large = EngineRemoved(block_hashes=tuple(range(20)))
    events: list[EngineEvent] = [two, gone, EngineCleared(), two, large, EngineCleared()]
    assert list(batches_of(events)) == [
        (10, [two, gone, EngineCleared()]),
        (6, [two]),
        (20, [large]),
        (0, [EngineCleared()]),
    ]
    assert list(batches_of([])) == []


async def test_a_source_that_cannot_be_polled_is_polled_again_and_says_so_meanwhile() -> None:
    polls = ScriptedPolls()
    async with running_poller(Source(polls.poll, buffer_events=2)) as (poller, delivered):
        await poller.until_delivered()
        with capture_logs() as lines:
            polls.say(EngineError("the engine is busy"), EngineError("the engine is busy"))
            await eventually(lambda: poller.failure == "cannot be polled: the engine is busy")
            polls.say(
                [RankEvent(0, REMOVAL)], [RankEvent(0, REMOVAL)] * 2, EngineError("and now"), [RankEvent(0, REMOVAL)]
            )
            await eventually(lambda: poller.poll_failures_total == 3)
            await poller.until_delivered()
        assert delivered.sizes == [1, 2, 1]
        assert poller.failure == ""
    assert [line["event"] for line in lines] == ["source_not_polled"] * 2


async def test_when_the_source_ran_dry_it_is_said_up_to_which_message_and_after_which_losses() -> None:
    lost: dict[int, int] = {}
    polls = ScriptedPolls()

    def translate(events: list[RankEvent]) -> list[RankEvent]:
        lost[0] = lost.get(0, 0) + sum(event.event == EngineCleared() for event in events)
        return events

    async with running_poller(Source(polls.poll, translate, buffer_events=100, events_lost=lost)) as (poller, _):
        await poller.until_delivered()
        polls.say([RankEvent(0, REMOVAL)])
        await eventually(lambda: poller.drained == DrainedMoment(1, {0: 0}))
        polls.say([RankEvent(0, EngineCleared())], [RankEvent(0, REMOVAL), RankEvent(0, EngineCleared())])
        await eventually(lambda: poller.drained == DrainedMoment(3, {0: 2}))
        assert not poller.drain.is_pressed


# -------------------------------------------------------------------- the queue between the thread and the event loop
T = TypeVar("T")


def putting(waiting: Handover[T], *entries: T, weight: int) -> threading.Thread:
    """Return a thread that puts the entries."""

    def put() -> None:
        for entry in entries:
            waiting.put(entry, weight)

    thread = threading.Thread(target=put)
    thread.start()
    return thread


async def test_all_entries_come_in_their_order() -> None:
    waiting: Handover[int] = Handover(weight_max=10)
    thread = putting(waiting, *range(10_000), weight=3)
    async with asyncio.timeout(WAIT_S):
        assert [await waiting.next() for _ in range(10_000)] == list(range(10_000))
    thread.join()


async def test_the_thread_waits_while_the_bound_is_reached_and_an_entry_of_any_weight_passes() -> None:
    waiting: Handover[str] = Handover(weight_max=10)
    waiting.put("small", 9)
    waiting.put("large", 1000)
    thread = putting(waiting, "third", weight=1)
    assert await waiting.next() == "small"
    assert thread.is_alive()  # the large one waits, too heavy for more
    assert await waiting.next() == "large"
    async with asyncio.timeout(WAIT_S):
        assert await waiting.next() == "third"
    thread.join()


async def test_once_closed_a_waiting_thread_goes_on_and_entries_are_dropped() -> None:
    waiting: Handover[int] = Handover(weight_max=1)
    waiting.put(0, 1)
    thread = putting(waiting, 1, 2, 3, weight=1)
    waiting.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
