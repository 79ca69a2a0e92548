"""The poller: what it polls is what is applied, in order, without a hole."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from structlog.testing import capture_logs

from kv_protocol.events import Tier
from kv_runtime.clock import Clock
from kv_runtime.supervise import Restarts
from tests.support.parts import at_work
from tests.system.integration.broker import eventually
from tests.system.integration.event_path import TranslatedEvents
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineBatch, EngineCleared, EngineRemoved, EngineStored, RankEvent
from worker_agent.events.source_poller import Pace, Source, SourcePoller
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
        self._polls = asyncio.Queue[list[RankEvent] | EngineError]()

    def say(self, *polls: list[RankEvent] | EngineError) -> None:
        for poll in polls:
            self._polls.put_nowait(poll)

    async def poll(self, timeout_s: float) -> list[RankEvent]:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                polled = await self._polls.get()
                if isinstance(polled, EngineError):
                    raise polled
                return polled
        return []


class WallClock(Clock):
    def wall_ns(self) -> int:
        return 1_500_000_000


@dataclass
class Applied:
    """What a poller had applied; None: a loss."""

    batches: list[EngineBatch | None] = field(default_factory=list)


@asynccontextmanager
async def running_poller(
    take: Callable[[float], Awaitable[list[RankEvent]]], *, rules: TrtllmRules | None = None, buffer_events: int = 0
) -> AsyncIterator[tuple[SourcePoller, Applied]]:
    applied = Applied()
    poller = SourcePoller(
        Source(lambda _, timeout_s: take(timeout_s), rules or TranslatedEvents(), buffer_events),
        applied.batches.append,
        lambda: applied.batches.append(None),
        WallClock(),
        poll_s=0.01,
        restarts=Restarts(failures_max=100, pause_s=0.0),
    )
    async with asyncio.timeout(WAIT_S), at_work(poller.work.part()):
        yield poller, applied


async def test_each_event_is_a_batch_of_its_rank_with_the_number_of_its_poll() -> None:
    source = ScriptedPolls()
    said = [RankEvent(0, HOST_STORE), RankEvent(1, REMOVAL), RankEvent(0, NAMED_STORE)]
    async with running_poller(source.poll) as (poller, applied):
        source.say([RankEvent(0, REMOVAL)])
        await poller.until_applied()
        source.say(said)
        await poller.until_applied()
    assert applied.batches == [
        EngineBatch(sequence=0, dp_rank=0, time_s=1.5, events=(REMOVAL,)),
        EngineBatch(sequence=1, dp_rank=0, time_s=1.5, events=(HOST_STORE,)),
        EngineBatch(sequence=1, dp_rank=1, time_s=1.5, events=(REMOVAL,)),
        EngineBatch(sequence=1, dp_rank=0, time_s=1.5, events=(NAMED_STORE,)),
    ]


async def test_after_an_unexpected_error_a_loss_has_the_next_sequence_and_polling_continues() -> None:
    source, errors = ScriptedPolls(), [ZeroDivisionError("unexpected")]

    async def take(timeout_s: float) -> list[RankEvent]:
        taken = await source.poll(timeout_s)
        if taken and errors:
            raise errors.pop()
        return taken

    async with running_poller(take) as (poller, applied):
        source.say([RankEvent(0, REMOVAL)])
        await eventually(lambda: applied.batches == [None])
        source.say([RankEvent(0, REMOVAL)])
        await poller.until_applied()
        assert poller.work.failures_total == 1
    assert applied.batches == [None, EngineBatch(sequence=1, dp_rank=0, time_s=1.5, events=(REMOVAL,))]


async def test_events_are_applied_while_requests_keep_the_default_executor_busy() -> None:
    source, release = ScriptedPolls(), threading.Event()
    with ThreadPoolExecutor(1) as requests:
        asyncio.get_running_loop().set_default_executor(requests)
        requests.submit(release.wait)
        try:
            async with running_poller(source.poll) as (poller, applied):
                source.say([RankEvent(0, REMOVAL)])
                await poller.until_applied()
        finally:
            release.set()
    assert len(applied.batches) == 1


async def test_other_tasks_have_their_turn_after_some_events() -> None:
    polls, turns = ScriptedPolls(), set[int]()
    async with running_poller(polls.poll) as (_, applied):
        polls.say([RankEvent(0, REMOVAL)] * 1600)
        while len(applied.batches) < 1600:
            turns.add(len(applied.batches))
            await asyncio.sleep(0)
    assert len(turns) >= 1600 // 256


async def test_a_source_that_cannot_be_polled_is_polled_again_and_says_so_meanwhile() -> None:
    polls = ScriptedPolls()
    async with running_poller(polls.poll, buffer_events=2) as (poller, applied):
        await poller.until_applied()
        with capture_logs() as lines:
            polls.say(EngineError("the engine is busy"), EngineError("the engine is busy"))
            await eventually(lambda: poller.failure == "cannot be polled: the engine is busy")
            polls.say(
                [RankEvent(0, REMOVAL)], [RankEvent(0, REMOVAL)] * 2, EngineError("and now"), [RankEvent(0, REMOVAL)]
            )
            await eventually(lambda: poller.poll_failures_total == 3)
            await poller.until_applied()
        assert len(applied.batches) == 4
        assert poller.failure == ""
    assert [line["event"] for line in lines] == ["source_not_polled"] * 2


class LosingRules(TranslatedEvents):
    """A cleared rank has lost an event."""

    def translate(self, engine_events: object) -> list[RankEvent]:
        events = super().translate(engine_events)
        self.events_lost[0] = self.events_lost.get(0, 0) + sum(event.event == EngineCleared() for event in events)
        return events


async def test_when_the_source_ran_dry_it_is_said_after_which_losses() -> None:
    polls = ScriptedPolls()
    async with running_poller(polls.poll, rules=LosingRules(), buffer_events=100) as (poller, applied):
        await poller.until_applied()
        polls.say([RankEvent(0, REMOVAL)])
        await eventually(lambda: len(applied.batches) == 1 and poller.lost_before_read == {0: 0})
        polls.say([RankEvent(0, EngineCleared())], [RankEvent(0, REMOVAL), RankEvent(0, EngineCleared())])
        await eventually(lambda: poller.lost_before_read == {0: 2})
        assert len(applied.batches) == 4
        assert not poller.pace.is_pressed


# -------------------------------------------------------------------- the pace of polls
def test_at_normal_pace_polls_wait() -> None:
    pace = Pace(100)
    for events in (1, 50, 0):
        assert pace.on_poll(events, is_lossy=False) is (events == 0)
        assert not pace.is_pressed
    assert (pace.polls_total, pace.pressed_polls_total, pace.largest_ratio) == (3, 0, 0.5)


def test_a_poll_of_more_than_half_the_buffer_presses_until_a_poll_brings_nothing() -> None:
    pace = Pace(100)
    for events in (51, 3):
        assert not pace.on_poll(events, is_lossy=False)
        assert pace.is_pressed
    assert pace.on_poll(0, is_lossy=False)
    assert (pace.is_pressed, pace.pressed_polls_total, pace.largest_ratio) == (False, 2, 0.51)


def test_a_loss_presses_until_a_poll_brings_nothing_and_is_not_all_there_was() -> None:
    for pace in (Pace(100), Pace()):
        for events in (7, 0):
            assert not pace.on_poll(events, is_lossy=True)
            assert pace.is_pressed
        assert not pace.on_poll(1, is_lossy=False)
        assert pace.is_pressed
        assert pace.on_poll(0, is_lossy=False)
        assert not pace.is_pressed
