"""Virtual time: what is due is done in order, and no more of it than a world needs."""

import asyncio
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from random import Random

from kv_runtime.clock import Clock

Action = Callable[[], None]

STEPS_MAX = 60_000
"""Several times what the busiest world takes: one that needs more goes round in circles."""
WALL_NS = 1_700_000_000_000_000_000
_ORIGIN_MAX_S = 1e6


class Timeline:
    """Does what is due, in the order of time, and of arrangement at equal times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._due: list[tuple[float, int, Action]] = []
        self._arranged = 0

    def after(self, delay_s: float, action: Action) -> None:
        """`action` is done `delay_s` from now."""
        self._arranged += 1
        heappush(self._due, (self.now_s + delay_s, self._arranged, action))

    def every(self, period_s: float, action: Callable[[], bool]) -> None:
        """`action` is done now and each `period_s`, until it returns False."""
        if action():
            self.after(period_s, partial(self.every, period_s, action))

    def run(self, until_s: float) -> None:
        """Everything due until then is done; an `AssertionError` says that it has no end."""
        due = self._due
        while due and due[0][0] <= until_s:
            self.now_s, _, action = heappop(due)
            self.steps += 1
            assert self.steps <= STEPS_MAX, f"livelock: more than {STEPS_MAX} steps by {self.now_s:.2f} s"
            action()
        self.now_s = until_s


class ProcessClock(Clock):
    """What one process knows of time: its monotonic clock began anywhere, its wall clock may be set."""

    def __init__(self, timeline: Timeline, random: Random) -> None:
        self._timeline = timeline
        self._origin_s = random.random() * _ORIGIN_MAX_S
        self._set_by_ns = 0

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._origin_s + self._timeline.now_s

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, as far as this process knows."""
        return WALL_NS + self._set_by_ns + round(self._timeline.now_s * 1e9)

    def set_by(self, seconds: float) -> None:
        """The wall clock is set, forward or back."""
        self._set_by_ns += round(seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Fail: no process sleeps in virtual time; later work is scheduled on the timeline."""
        raise AssertionError(f"a sleep of {seconds} s in virtual time")

    async def wait(self, _event: asyncio.Event, seconds: float) -> None:
        """Fail, as `sleep`."""
        await self.sleep(seconds)
