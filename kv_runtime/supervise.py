"""Runs the parts of a process: makes their tasks and threads, each of which has an owner that waits for its end.

A process is a set of parts in stages. `run_parts` runs them all, and ends in one of five ways:

    a part raises               the others are cancelled; the error is raised, with a note that names the part
    a part returns before stop  the others are cancelled; `PartEnded` is raised: a part must run until stop
    stop is set                 stages are asked to stop in rising order, each once the one before has returned:
                                sources (stage 0) first, so that the queues after them empty
    a part gives up             stop is set for all; its `PartGaveUp` is raised once the others have drained
    the drain budget is spent   parts that still run are cancelled and named in `DrainOverdue`

When stop is set and a part counts its work `in_progress`, the log has the amount and the budget (`drain_began`), and at
the end the duration and the parts that were cut off (`drain_ended`).

Stop is an argument: a part gets an `asyncio.Event`, and returns soon after it is set.

`SupervisedWork` survives unexpected errors:

    the work raises                            counted, logged; restarted after a pause
    it raises too often (`Restarts`)           given up
    it raises after stop was set               given up: the rest of the work is lost

Its blocking calls run in a thread of its own, so that they never wait for calls of other parts.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future as ThreadOutcome
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from kv_runtime.clock import Clock

T = TypeVar("T")

JOIN_S = 5.0
"""How long cancelled work waits for its thread."""
_FAILURE_CHARACTERS_MAX = 500

_log = structlog.get_logger("supervise")


class PartEnded(Exception):
    """A part returned, or cancelled itself, before stop was set."""


class PartGaveUp(Exception):
    """A part cannot continue; the others drain, and the process ends with this error."""


class DrainOverdue(Exception):
    """Parts had not returned when the drain budget was spent, and were cancelled."""


class ThreadStuck(Exception):
    """A cancelled thread did not return; it still runs, and the process cannot end before it does."""


class TaskSetFull(Exception):
    """The task set is full; the task was not started."""


@dataclass(frozen=True)
class Part:
    """A part of a process: `run(stop)` returns soon after `stop` is set, and not before."""

    name: str
    run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    stage: int = 0
    """Lower stages stop first; sources are 0."""
    in_progress: Callable[[], Mapping[str, int]] | None = None
    """Counts the work that the part finishes before it returns, by name, such as `requests`; may be empty."""


async def run_parts(parts: Iterable[Part], *, stop: asyncio.Event, drain_s: float, clock: Clock | None = None) -> None:
    """Run all parts until `stop` is set and every part has returned; no task of theirs remains.

    Names must differ. `drain_s` is for all stages together. Cancelling the caller cancels all parts at once.

    Raises:
        DrainOverdue: parts were cancelled for being slow.
        PartGaveUp: a part gave up, and the others have drained.
        Exception: raised by a part (`PartEnded` if it returned early); several errors in one ExceptionGroup.
    """
    errors: list[Exception] = []
    try:
        overdue = await _run_stages(list(parts), stop, drain_s, clock or Clock(), errors)
    except ExceptionGroup as group:
        errors += group.exceptions
    else:
        if overdue:
            errors.append(DrainOverdue(f"cancelled after {drain_s} s of draining: {', '.join(overdue)}"))
    if len(errors) > 1:
        raise ExceptionGroup("several parts failed", errors)
    for error in errors:
        raise error from error.__cause__


async def _run_stages(
    parts: list[Part], stop: asyncio.Event, drain_s: float, clock: Clock, given_up: list[Exception]
) -> tuple[str, ...]:
    """Return the names of the parts that had to be cancelled; append the errors of parts that gave up to `given_up`."""
    assert len({part.name for part in parts}) == len(parts)
    stops = {part.stage: asyncio.Event() for part in parts}
    async with asyncio.TaskGroup() as group:
        tasks = {
            part: group.create_task(_run_part(part, stops[part.stage], stop, given_up), name=part.name)
            for part in parts
        }
        await stop.wait()
        counts, began_s = [part.in_progress for part in parts if part.in_progress is not None], clock.now()
        if counts:
            _log.info("drain_began", **_in_progress(counts), at_most_s=drain_s)
        budget = group.create_task(clock.sleep(drain_s), name="drain budget")
        for stage in sorted(stops):
            stops[stage].set()
            await _ended({task for part, task in tasks.items() if part.stage == stage}, budget)
        budget.cancel()
        overdue = tuple(part.name for part, task in tasks.items() if task.cancel())
        if counts:
            took_s = round(clock.now() - began_s, 3)
            _log.info("drain_ended", **_in_progress(counts), took_s=took_s, cut_off=list(overdue))
        return overdue


def _in_progress(counts: list[Callable[[], Mapping[str, int]]]) -> Counter[str]:
    total = Counter[str]()
    for count in counts:
        total.update(count())
    return total


async def _run_part(part: Part, stop: asyncio.Event, stop_all: asyncio.Event, given_up: list[Exception]) -> None:
    """Run the part; `stop` is its stage's event; the part may return only once `stop_all` is set."""
    try:
        await part.run(stop)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # else the error comes from what the part awaits
            raise
    except PartGaveUp as error:
        error.add_note(f"in part {part.name!r}")
        given_up.append(error)
        stop_all.set()
    except Exception as error:
        error.add_note(f"in part {part.name!r}")
        raise
    if not stop_all.is_set():
        raise PartEnded(f"part {part.name!r} ended before it was asked to stop")


async def _ended(tasks: set[asyncio.Task[None]], budget: asyncio.Task[None]) -> None:
    """Return when all `tasks` have ended, or the budget has."""
    while tasks and not budget.done():
        done, _ = await asyncio.wait({*tasks, budget}, return_when=asyncio.FIRST_COMPLETED)
        tasks = tasks - done


async def _joined(name: str, outcome: ThreadOutcome[T], join_s: float) -> asyncio.Future[T]:
    """Return the outcome once the thread has ended; raise `ThreadStuck` if it has not within `join_s`."""
    ending = asyncio.wrap_future(outcome)
    await asyncio.wait([ending], timeout=join_s)
    if not ending.done():
        raise ThreadStuck(f"thread {name!r} still runs {join_s} s after it was cancelled") from None
    return ending


@dataclass(frozen=True)
class Restarts:
    """The restart policy of work: with `failures_max` failures within `window_s` it is given up.

    The pause before a restart is `pause_s`, doubled for each further failure within the window, at most `pause_max_s`.
    """

    failures_max: int = 5
    window_s: float = 60.0
    pause_s: float = 0.2
    pause_max_s: float = 5.0


RESTARTS = Restarts()
"""For work that may fail occasionally: it is given up at the fifth failure within a minute."""


class Failures:
    """The failures of one piece of work, as far as its restart policy counts them."""

    def __init__(self, restarts: Restarts, clock: Clock) -> None:
        self._restarts, self._clock = restarts, clock
        self._at_s = deque[float](maxlen=restarts.failures_max)

    def count(self) -> float | None:
        """Count a failure that happens now; return the pause before the restart, in seconds; None: give up."""
        now_s, allowed = self._clock.now(), self._restarts
        self._at_s.append(now_s)
        recent = sum(now_s - each < allowed.window_s for each in self._at_s)
        if recent >= allowed.failures_max:
            return None
        return min(allowed.pause_s * 2.0 ** (recent - 1), allowed.pause_max_s)


class SupervisedWork:
    """Asynchronous `work(stop)`, restarted when it raises. The work itself restores its state after a restart."""

    def __init__(
        self,
        name: str,
        work: Callable[[asyncio.Event], Awaitable[None]],
        *,
        restarts: Restarts = RESTARTS,
        clock: Clock | None = None,
        join_s: float = JOIN_S,
    ) -> None:
        self.name, self._work, self._clock, self._join_s = name, work, clock or Clock(), join_s
        self._failures = Failures(restarts, self._clock)
        self._thread = ThreadPoolExecutor(1, name)
        self.failures_total = 0
        self.failure = ""
        """The last error, shortened, until the restart; empty while the work runs."""

    def part(self, *, stage: int = 0) -> Part:
        """Return the work as a part of a process."""
        return Part(self.name, self.run, stage)

    async def run(self, stop: asyncio.Event) -> None:
        """Return once the work has returned.

        Raises:
            PartGaveUp: it failed too often, or after stop was set; the last failure is its cause.
            ThreadStuck: it was cancelled during a `call` that does not return.
        """
        try:
            await self._run(stop)
        finally:
            self._thread.shutdown(wait=False)

    async def call(self, function: Callable[[], T], /) -> T:
        """Call the function on the work's own thread, and return its result; only while `run` runs.

        A cancelled call is awaited; `ThreadStuck` is raised if it has not returned after `join_s`.
        """
        outcome = self._thread.submit(function)
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            await _joined(self.name, outcome, self._join_s)
            raise

    async def _run(self, stop: asyncio.Event) -> None:
        while True:
            try:
                await self._work(stop)
            except ThreadStuck:
                raise
            except Exception as error:
                self.failures_total += 1
                self.failure = f"{type(error).__name__}: {error}"[:_FAILURE_CHARACTERS_MAX]
                pause_s = self._failures.count()
                _log.error("thread_failed", thread=self.name, begins_again_in_s=pause_s, exc_info=error)
                if pause_s is not None:
                    await self._clock.wait(stop, pause_s)
                if pause_s is None or stop.is_set():
                    raise PartGaveUp(f"thread {self.name!r} failed: {self.failure}") from error
                self.failure = ""
            else:
                return


async def until(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return what `work` returns; None if `stop` is set first: `work` is then cancelled and awaited.

    Errors of `work` are raised. This costs two tasks: use it for waits, not for every message of a stream.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))
    return None if working.cancelled() and stop.is_set() else working.result()


class TaskSet(asyncio.TaskGroup):
    """At most `limit` short-lived tasks, owned by the task that entered it: `async with TaskSet(100) as tasks`.

    Leaving the block waits for them, and cancels them when the owner is cancelled or fails. A task that raises cancels
    the others and the owner; its error leaves the block in an ExceptionGroup.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._running = 0

    def __len__(self) -> int:
        return self._running

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str | None = None) -> asyncio.Task[None]:
        """Start `work` and return its task, which the caller may cancel; raise `TaskSetFull` at the limit."""
        if self._running >= self._limit:
            work.close()
            raise TaskSetFull(f"{self._limit} tasks run already")
        task = self.create_task(work, name=name)
        self._running += 1
        task.add_done_callback(self._on_ended)
        return task

    def _on_ended(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
