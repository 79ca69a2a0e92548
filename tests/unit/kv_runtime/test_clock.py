"""Both clocks keep one contract; the manual one keeps still until it is told to move."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kv_runtime.clock import Clock, SystemClock
from tests.support.manual_clock import ManualClock

MILLISECOND = 0.001
Elapse = Callable[[float], Awaitable[None]]


@pytest.fixture(params=["system", "manual"])
def clock(request: pytest.FixtureRequest) -> Clock:
    return SystemClock() if request.param == "system" else ManualClock(now_s=100.0, wall_ns=1_700_000_000_000_000_000)


@pytest.fixture
def elapse(clock: Clock) -> Elapse:
    """Let time pass: the manual clock is moved, the other one moves by itself."""

    async def passing(seconds: float) -> None:
        await (clock.advance(seconds) if isinstance(clock, ManualClock) else clock.sleep(2 * seconds))

    return passing


async def test_now_never_goes_back(clock: Clock, elapse: Elapse) -> None:
    readings = [clock.now()]
    for _ in range(3):
        await elapse(MILLISECOND)
        readings.append(clock.now())
    assert readings == sorted(readings)


async def test_a_sleep_lasts_as_long_as_was_asked(clock: Clock, elapse: Elapse) -> None:
    async def slept() -> float:
        start_s = clock.now()
        await clock.sleep(3 * MILLISECOND)
        return clock.now() - start_s

    async with asyncio.TaskGroup() as group:
        task = group.create_task(slept())
        await elapse(5 * MILLISECOND)
    assert task.result() >= 2 * MILLISECOND


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_a_sleep_of_nothing_lets_other_tasks_run(clock: Clock, seconds: float) -> None:
    ran = asyncio.Event()

    async def other() -> None:
        ran.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(other())
        await clock.sleep(seconds)
        assert ran.is_set()


async def test_a_cancelled_sleeper_does_not_hold_up_the_others(clock: Clock, elapse: Elapse) -> None:
    async with asyncio.TaskGroup() as group:
        cancelled = group.create_task(clock.sleep(MILLISECOND))
        other = group.create_task(clock.sleep(2 * MILLISECOND))
        await asyncio.sleep(0)
        cancelled.cancel()
        await elapse(3 * MILLISECOND)
    assert (cancelled.cancelled(), other.done()) == (True, True)


async def test_the_manual_clock_stops_at_every_deadline_on_the_way() -> None:
    clock = ManualClock()
    readings: list[float] = []

    async def every_second() -> None:
        for _ in range(3):
            await clock.sleep(1.0)
            readings.append(clock.now())

    async with asyncio.TaskGroup() as group:
        group.create_task(every_second())
        await clock.advance(3.5)
        assert readings == [1.0, 2.0, 3.0]
    assert (clock.now(), clock.wall_ns()) == (3.5, 3_500_000_000)
