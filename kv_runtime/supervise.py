"""Every task and every thread has an owner; this is the only module that makes any.

A process is a set of parts in stages. `run_parts` runs them all, and ends in one of four ways:

    a part raises               the others are cancelled; the error is raised, with a note that names the part
    a part returns before stop  the same, with `PartEnded`: what should run for ever and does not is broken
    stop is set                 stages are asked to stop in rising order, each once the one before has returned:
                                sources (stage 0) first, so that the queues behind them run dry
    the drain budget is spent   what still runs is cancelled and named in `DrainOverdue`

Stop is an argument: a part gets an `asyncio.Event`, a thread a `threading.Event`, and returns soon after it is set.
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future as ThreadOutcome
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from kv_runtime.clock import Clock, SystemClock

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class PartEnded(Exception):
    """A part returned, or cancelled itself, though nobody had asked it to stop."""

    def __init__(self, name: str) -> None:
        super().__init__(f"part {name!r} ended before it was asked to stop")
        self.name = name


class DrainOverdue(Exception):
    """Parts had not returned when the drain budget was spent, and were cancelled."""

    def __init__(self, names: tuple[str, ...], drain_s: float) -> None:
        super().__init__(f"cancelled after {drain_s} s of draining: {', '.join(names)}")
        self.names = names
        self.drain_s = drain_s


class ThreadStuck(Exception):
    """A cancelled thread did not return; it still runs, and the process cannot end before it does."""

    def __init__(self, name: str, join_s: float) -> None:
        super().__init__(f"thread {name!r} still runs {join_s} s after it was cancelled")
        self.name = name
        self.join_s = join_s


class TaskSetFull(Exception):
    """A task set holds as many tasks as it may; this one was not begun."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} tasks run already")
        self.limit = limit


@dataclass(frozen=True)
class Part:
    """A part of a process: `run(stop)` returns soon after `stop` is set, and not before."""

    name: str
    run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    stage: int = 0
    """Lower stages stop first; sources are 0."""


async def run_parts(parts: Iterable[Part], *, stop: asyncio.Event, drain_s: float, clock: Clock | None = None) -> None:
    """Run all parts until `stop` is set and every part has returned; afterwards no task of theirs is left.

    Names must differ. `drain_s` is for all stages together. Cancelling the caller cancels all parts at once.

    Raises:
        DrainOverdue: parts were cancelled for being slow.
        Exception: what a part raised (`PartEnded` where it returned early); several errors in one ExceptionGroup.
    """
    try:
        overdue = await _run_stages(list(parts), stop, drain_s, clock or SystemClock())
    except ExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    if overdue:
        raise DrainOverdue(overdue, drain_s)


async def _run_stages(parts: list[Part], stop: asyncio.Event, drain_s: float, clock: Clock) -> tuple[str, ...]:
    """Return the names of the parts that had to be cancelled."""
    assert len({part.name for part in parts}) == len(parts)
    stops = {part.stage: asyncio.Event() for part in parts}
    async with asyncio.TaskGroup() as group:
        tasks = {part: group.create_task(_run_part(part, stops[part.stage], stop), name=part.name) for part in parts}
        await stop.wait()
        budget = group.create_task(clock.sleep(drain_s), name="drain budget")
        for stage in sorted(stops):
            stops[stage].set()
            await _ended({task for part, task in tasks.items() if part.stage == stage}, budget)
        budget.cancel()
        return tuple(part.name for part, task in tasks.items() if task.cancel())


async def _run_part(part: Part, stop: asyncio.Event, stop_all: asyncio.Event) -> None:
    """Run the part; `stop` is its stage's, and `stop_all` says whether it may return at all."""
    try:
        await part.run(stop)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
    except Exception as error:
        error.add_note(f"in part {part.name!r}")
        raise
    if not stop_all.is_set():
        raise PartEnded(part.name)


def _is_cancelled() -> bool:
    """Return whether somebody asked the current task to end; else its CancelledError comes from what it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _ended(tasks: set[asyncio.Task[None]], budget: asyncio.Task[None]) -> None:
    """Return when all `tasks` have ended, or the budget has."""
    while tasks and not budget.done():
        done, _ = await asyncio.wait({*tasks, budget}, return_when=asyncio.FIRST_COMPLETED)
        tasks = tasks - done


def thread_part(name: str, target: Callable[[threading.Event], None], *, stage: int = 0, join_s: float = 5.0) -> Part:
    """Return a part that runs the blocking `target(stop)` in a thread of its own.

    A thread cannot be cancelled: if the part is, the thread is asked to stop, and `ThreadStuck` raised if it has not
    returned within `join_s`. What `target` raises, the part raises.
    """

    async def run(stop: asyncio.Event) -> None:
        asked, outcome = threading.Event(), ThreadOutcome[None]()
        outcome.set_running_or_notify_cancel()  # from now on a cancelled awaiter leaves it as it is
        threading.Thread(target=_settle, args=(outcome, target, asked), name=name, daemon=False).start()
        try:
            await until(stop, asyncio.wrap_future(outcome))
            asked.set()
            await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            asked.set()
            ending = asyncio.wrap_future(outcome)
            await asyncio.wait([ending], timeout=join_s)
            if not ending.done():
                raise ThreadStuck(name, join_s) from None
            ending.result()
            raise

    return Part(name, run, stage)


def _settle(outcome: ThreadOutcome[None], target: Callable[[threading.Event], None], stop: threading.Event) -> None:
    try:
        target(stop)
    except BaseException as error:  # noqa: BLE001  (raised again where the part is awaited)
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


async def until(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return what `work` returns, or None once `stop` is set, when `work` has been cancelled and has ended.

    What `work` raises is raised. This costs two tasks: it is for waits, not for every message of a stream.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))
    return None if working.cancelled() and stop.is_set() else working.result()


class TaskSet:
    """At most `limit` short-lived tasks, owned by whoever entered it: `async with TaskSet(100) as tasks`.

    Leaving the block waits for them, and cancels them when the owner is cancelled or fails. A task that raises cancels
    the others and the owner, and leaves the block in an ExceptionGroup.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self._group = asyncio.TaskGroup()

    def __len__(self) -> int:
        return self._running

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._group.__aexit__(kind, error, traceback)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str | None = None) -> asyncio.Task[None]:
        """Begin `work` and return its task, which may be cancelled alone; raise `TaskSetFull` at the limit."""
        if self._running >= self._limit:
            work.close()
            raise TaskSetFull(self._limit)
        task = self._group.create_task(work, name=name)
        self._running += 1
        task.add_done_callback(self._on_ended)
        return task

    def _on_ended(self, _: asyncio.Task[None]) -> None:
        self._running -= 1


def install_signals(stop: asyncio.Event) -> Callable[[], None]:
    """Let SIGINT and SIGTERM set `stop`; return a function that undoes this.

    A signal that comes when `stop` is set already cancels the calling task at once; the next one does what the system
    does with it. Only for the main thread's event loop.
    """
    loop, caller = asyncio.get_running_loop(), asyncio.current_task()
    assert caller is not None

    def undo() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        if stop.is_set():
            undo()
            caller.cancel()
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    return undo


def run_process(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `main(stop)` as the process's whole life, on uvloop; SIGINT and SIGTERM set `stop`.

    A second signal cuts off what is still running: the process ends at once, with exit code 1 and a line that says so.
    """

    async def life() -> None:
        stop = asyncio.Event()
        undo = install_signals(stop)
        try:
            await main(stop)
        finally:
            undo()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(life())
        except asyncio.CancelledError:
            sys.exit("stopped by a second signal: what was running was cut off")
