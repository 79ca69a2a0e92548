"""How a process's parts, threads and short tasks fail and end: together, in order, in time, and never unseen."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_runtime.supervise import (
    DrainOverdue,
    Failures,
    Part,
    PartEnded,
    PartGaveUp,
    Restarts,
    SupervisedWork,
    TaskSet,
    TaskSetFull,
    ThreadStuck,
    run_parts,
    until,
)
from tests.support.manual_clock import ManualClock

DRAIN_S = 10.0
Run = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


class Diary:
    """Parts that write down what happens to them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_lines = asyncio.Event()

    def part(self, name: str, stage: int = 0, *, obedient: bool = True) -> Part:
        """Return a part that waits for stop, or one that only a cancellation ends."""

        async def run(stop: asyncio.Event) -> None:
            try:
                await (stop.wait() if obedient else asyncio.Event().wait())
                self._write(f"{name} stopped")
            except asyncio.CancelledError:
                self._write(f"{name} cancelled")
                raise

        return Part(name, run, stage, dict)

    def _write(self, line: str) -> None:
        self.lines.append(line)
        self.has_lines.set()


def failing(error: Exception) -> Run:
    async def run(_: asyncio.Event) -> None:
        await asyncio.sleep(0)
        raise error

    return run


async def returning(_: asyncio.Event) -> None:
    await asyncio.sleep(0)


def stopped() -> asyncio.Event:
    stop = asyncio.Event()
    stop.set()
    return stop


# ---------------------------------------------------------------- parts
async def test_a_later_stage_is_asked_only_when_the_earlier_has_returned() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    written: list[int] = []

    async def source(stop: asyncio.Event) -> None:
        await stop.wait()
        for item in range(3):
            await asyncio.sleep(0)
            queue.put_nowait(item)

    async def writer(stop: asyncio.Event) -> None:
        await stop.wait()
        while not queue.empty():
            written.append(queue.get_nowait())

    await run_parts([Part("writer", writer, 1), Part("source", source)], stop=stopped(), drain_s=DRAIN_S)
    assert written == [0, 1, 2]


async def test_a_failure_cancels_the_others_and_names_its_part() -> None:
    diary = Diary()
    with pytest.raises(ZeroDivisionError) as raised:
        await run_parts(
            [diary.part("other"), Part("broken", failing(ZeroDivisionError()))], stop=asyncio.Event(), drain_s=DRAIN_S
        )
    assert diary.lines == ["other cancelled"]
    assert raised.value.__notes__ == ["in part 'broken'"]


async def test_a_part_that_returns_early_is_a_failure() -> None:
    diary = Diary()
    with pytest.raises(PartEnded) as raised:
        await run_parts([diary.part("other"), Part("short", returning)], stop=asyncio.Event(), drain_s=DRAIN_S)
    assert (str(raised.value)[:12], diary.lines) == ("part 'short'", ["other cancelled"])


async def test_a_later_part_may_return_once_stop_is_set() -> None:
    diary = Diary()
    await run_parts([diary.part("source"), Part("short", returning, 1)], stop=stopped(), drain_s=DRAIN_S)
    assert diary.lines == ["source stopped"]


async def test_what_overruns_the_budget_is_cancelled_and_named() -> None:
    diary, clock = Diary(), ManualClock()
    parts = [diary.part("slow", obedient=False), diary.part("quick"), diary.part("later", 1)]
    with capture_logs() as logged:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_overdue(parts, clock))
            await diary.has_lines.wait()
            await clock.advance(DRAIN_S - 0.001)
            assert not running.done()
            await clock.advance(0.002)
    assert sorted(diary.lines) == ["later cancelled", "quick stopped", "slow cancelled"]
    assert str(running.result()) == f"cancelled after {DRAIN_S} s of draining: slow, later"
    assert (logged[-1]["event"], logged[-1]["cut_off"]) == ("drain_ended", ["slow", "later"])


async def _overdue(parts: list[Part], clock: ManualClock) -> DrainOverdue:
    with pytest.raises(DrainOverdue) as raised:
        await run_parts(parts, stop=stopped(), drain_s=DRAIN_S, clock=clock)
    return raised.value


async def test_cancelling_the_caller_cancels_all_parts() -> None:
    diary = Diary()
    parts = [diary.part("a"), diary.part("b", 1)]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run_parts(parts, stop=asyncio.Event(), drain_s=DRAIN_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
    assert sorted(diary.lines) == ["a cancelled", "b cancelled"]


# ---------------------------------------------------------------- waits
async def test_until_ends_the_work_and_returns_none_when_stop_is_set() -> None:
    diary = Diary()
    stop = asyncio.Event()
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, stop.set)
    work: Coroutine[Any, Any, Any] = diary.part("work").run(asyncio.Event())
    assert await until(stop, work) is None
    assert diary.lines == ["work cancelled"]


# ---------------------------------------------------------------- task sets
async def test_a_full_task_set_refuses_and_has_room_again_when_a_task_ends() -> None:
    release = asyncio.Event()

    async def work() -> None:
        await release.wait()

    async with TaskSet(limit=1) as tasks:
        first = tasks.spawn(work())
        assert len(tasks) == 1
        with pytest.raises(TaskSetFull):
            tasks.spawn(work())
        release.set()
        await asyncio.wait([first])
        tasks.spawn(work())


# ---------------------------------------------------------------- the log
async def test_the_log_says_what_is_drained_how_long_at_most_and_how_long_it_took() -> None:
    clock, left, draining = ManualClock(), {"requests": 2, "connections": 3}, asyncio.Event()

    async def serve(stop: asyncio.Event) -> None:
        await stop.wait()
        draining.set()
        await clock.sleep(4.0)
        left.update(requests=0, connections=0)

    parts = [
        Part("data", serve, 0, lambda: left),
        Part("other", Diary().part("").run, 1, lambda: {"requests": 1}),
        Part("last", Diary().part("").run, 2),
    ]
    with capture_logs() as logged:
        running = asyncio.ensure_future(run_parts(parts, stop=stopped(), drain_s=DRAIN_S, clock=clock))
        await draining.wait()
        await clock.advance(4.0)
        await running
    info = {"log_level": "info"}
    assert logged == [
        {**info, "event": "drain_began", "requests": 3, "connections": 3, "at_most_s": DRAIN_S},
        {**info, "event": "drain_ended", "requests": 1, "connections": 0, "took_s": 4.0, "cut_off": []},
    ]


AT_ONCE = Restarts(failures_max=3, window_s=60.0, pause_s=0.0)


class Work:
    """Raises as often as it is told, `clock` moving on in between; then it waits for stop."""

    def __init__(self, failures: int, clock: ManualClock | None = None, every_s: float = 0.0) -> None:
        self._failures, self._clock, self._every_s = failures, clock, every_s
        self.runs = 0
        self.at_work = asyncio.Event()

    async def __call__(self, stop: asyncio.Event) -> None:
        self.runs += 1
        if self.runs <= self._failures:
            if self._clock is not None:
                await self._clock.advance(self._every_s)
            raise ZeroDivisionError(f"run {self.runs}")
        self.at_work.set()
        await stop.wait()


async def stopped_once(at_work: asyncio.Event, stop: asyncio.Event) -> None:
    await at_work.wait()
    stop.set()


# ---------------------------------------------------------------- supervised work
async def test_work_that_raises_begins_again_and_is_counted_and_logged() -> None:
    work, stop = Work(2), asyncio.Event()
    supervised = SupervisedWork("poller", work, restarts=AT_ONCE, clock=ManualClock())
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as group:
            group.create_task(stopped_once(work.at_work, stop))
            await run_parts([supervised.part()], stop=stop, drain_s=DRAIN_S)
    assert (work.runs, supervised.failures_total, supervised.failure) == (3, 2, "")
    assert [(line["event"], line["thread"]) for line in lines] == [("thread_failed", "poller")] * 2


async def test_work_that_fails_too_often_within_the_window_is_given_up_and_its_last_failure_is_the_cause() -> None:
    work = Work(99)
    supervised = SupervisedWork("poller", work, restarts=AT_ONCE, clock=ManualClock())
    with pytest.raises(PartGaveUp, match=r"^thread 'poller' failed: ZeroDivisionError: run 3$") as raised:
        await supervised.run(asyncio.Event())
    assert (work.runs, supervised.failures_total, str(raised.value.__cause__)) == (3, 3, "run 3")
    assert supervised.failure == "ZeroDivisionError: run 3"


@pytest.mark.parametrize(("every_s", "runs"), [(29.9, 3), (30.0, 11)])
async def test_failures_beyond_the_window_do_not_count(every_s: float, runs: int) -> None:
    """Three within 60 s are too many; at 30 s each, the first of any three is 60 s old."""
    clock, stop = ManualClock(), asyncio.Event()
    work = Work(10, clock, every_s)
    work.at_work = stop
    supervised = SupervisedWork("poller", work, restarts=AT_ONCE, clock=clock)
    if runs == 3:
        with pytest.raises(PartGaveUp):
            await supervised.run(stop)
    else:
        await supervised.run(stop)
    assert work.runs == runs


async def test_a_cancelled_call_that_does_not_return_is_named_and_is_no_failure_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_runtime.supervise.JOIN_S", 0.0)
    called, release = asyncio.Event(), threading.Event()

    def target(loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(called.set)
        release.wait()

    async def work(_: asyncio.Event) -> None:
        await supervised.call(partial(target, asyncio.get_running_loop()))

    supervised = SupervisedWork("deaf", work)
    running = asyncio.create_task(supervised.run(asyncio.Event()))
    await called.wait()
    running.cancel()
    try:
        with pytest.raises(ThreadStuck, match=r"^thread 'deaf' still runs"):
            await running
    finally:
        release.set()
    assert supervised.failures_total == 0


def test_pauses_double_up_to_their_bound() -> None:
    failures = Failures(Restarts(failures_max=6, pause_s=0.2, pause_max_s=1.0), ManualClock())
    assert [failures.count() for _ in range(6)] == [0.2, 0.4, 0.8, 1.0, 1.0, None]


# ---------------------------------------------------------------- the process
@pytest.mark.parametrize("stage", [0, 2])
async def test_a_part_that_gives_up_lets_the_others_drain_before_its_error_is_raised(stage: int) -> None:
    lines: list[str] = []

    def waiting(name: str) -> Run:
        async def run(stop: asyncio.Event) -> None:
            await stop.wait()
            lines.append(name)

        return run

    work = SupervisedWork("poller", Work(99), restarts=AT_ONCE)
    parts = [Part(name, waiting(name), at) for at, name in enumerate(("source", "folder", "writer"))]
    stop = asyncio.Event()
    with pytest.raises(PartGaveUp) as raised:
        await run_parts([*parts, work.part(stage=stage)], stop=stop, drain_s=DRAIN_S)
    assert lines == ["source", "folder", "writer"]
    assert stop.is_set()
    assert raised.value.__notes__ == ["in part 'poller'"]
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
