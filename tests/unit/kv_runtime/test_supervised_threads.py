"""Threads whose work raises an unexpected error: restarted, given up in time, and always reported."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_runtime.supervise import Failures, Part, PartGaveUp, Restarts, SupervisedThread, run_parts
from tests.support.manual_clock import ManualClock

DRAIN_S = 10.0
Run = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
AT_ONCE = Restarts(failures_max=3, window_s=60.0, pause_s=0.0)


class Work:
    """Raises as often as it is told, `clock` moving on in between; then it waits for stop."""

    def __init__(self, failures: int, clock: ManualClock | None = None, every_s: float = 0.0) -> None:
        self._failures, self._clock, self._every_s = failures, clock, every_s
        self.runs = 0
        self.threads: set[int] = set()
        self.at_work = threading.Event()

    def __call__(self, stop: threading.Event) -> None:
        self.runs += 1
        self.threads.add(threading.get_ident())
        if self.runs <= self._failures:
            if self._clock is not None:
                asyncio.run(self._clock.advance(self._every_s))
            raise ZeroDivisionError(f"run {self.runs}")
        self.at_work.set()
        stop.wait()


def gives_up(thread: SupervisedThread) -> PartGaveUp:
    with pytest.raises(PartGaveUp) as raised:
        thread.run(threading.Event())
    return raised.value


async def stopped_once(at_work: threading.Event, stop: asyncio.Event) -> None:
    await asyncio.to_thread(at_work.wait, 20)
    stop.set()


# ---------------------------------------------------------------- one thread
async def test_work_that_raises_begins_again_in_its_thread_and_is_counted_and_logged() -> None:
    work, stop = Work(2), asyncio.Event()
    thread = SupervisedThread("poller", work, restarts=AT_ONCE, clock=ManualClock())
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as group:
            group.create_task(stopped_once(work.at_work, stop))
            await run_parts([thread.part()], stop=stop, drain_s=DRAIN_S)
    assert (work.runs, len(work.threads), thread.failures_total, thread.failure) == (3, 1, 2, "")
    assert [(line["event"], line["thread"]) for line in lines] == [("thread_failed", "poller")] * 2


def test_work_that_fails_too_often_within_the_window_is_given_up_and_its_last_failure_is_the_cause() -> None:
    work = Work(99)
    thread = SupervisedThread("poller", work, restarts=AT_ONCE, clock=ManualClock())
    error = gives_up(thread)
    assert (work.runs, thread.failures_total, str(error.__cause__)) == (3, 3, "run 3")
    assert str(error) == "thread 'poller' failed: ZeroDivisionError: run 3"
    assert thread.failure == "ZeroDivisionError: run 3"


@pytest.mark.parametrize(("every_s", "runs"), [(29.9, 3), (30.0, 11)])
def test_failures_beyond_the_window_do_not_count(every_s: float, runs: int) -> None:
    """Three within 60 s are too many; at 30 s each, the first of any three is 60 s old."""
    clock, stop = ManualClock(), threading.Event()
    work = Work(10, clock, every_s)
    work.at_work = stop
    thread = SupervisedThread("poller", work, restarts=AT_ONCE, clock=clock)
    if runs == 3:
        with pytest.raises(PartGaveUp):
            thread.run(stop)
    else:
        thread.run(stop)
    assert work.runs == runs


def test_pauses_double_up_to_their_bound() -> None:
    failures = Failures(Restarts(failures_max=6, pause_s=0.2, pause_max_s=1.0), ManualClock())
    assert [failures.count() for _ in range(6)] == [0.2, 0.4, 0.8, 1.0, 1.0, None]


def test_what_is_no_exception_of_the_work_s_own_ends_the_thread() -> None:
    def exits(_: threading.Event) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        SupervisedThread("poller", exits, restarts=AT_ONCE).run(threading.Event())


# ---------------------------------------------------------------- the process
@pytest.mark.parametrize("stage", [0, 2])
async def test_a_part_that_gives_up_lets_the_others_drain_before_its_error_is_raised(stage: int) -> None:
    lines: list[str] = []

    def waiting(name: str) -> Run:
        async def run(stop: asyncio.Event) -> None:
            await stop.wait()
            lines.append(name)

        return run

    thread = SupervisedThread("poller", Work(99), restarts=AT_ONCE)
    parts = [Part(name, waiting(name), at) for at, name in enumerate(("source", "folder", "writer"))]
    stop = asyncio.Event()
    with pytest.raises(PartGaveUp) as raised:
        await run_parts([*parts, thread.part(stage=stage)], stop=stop, drain_s=DRAIN_S)
    assert lines == ["source", "folder", "writer"]
    assert stop.is_set()
    assert raised.value.__notes__ == ["in part 'poller'"]
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
