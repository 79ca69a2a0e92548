"""A clock that tests move."""

import asyncio
import heapq
import itertools

from kv_runtime.clock import Clock


class ManualClock(Clock):
    """A clock that moves only by `advance`: the verified fake of the system clock, for one event loop."""

    def __init__(self, now_s: float = 0.0, wall_ns: int = 0) -> None:
        self._now_s = now_s
        self._wall_ns = wall_ns
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the seconds the clock was moved to."""
        return self._now_s

    def wall_ns(self) -> int:
        """Return the wall time, which moves with `now`."""
        return self._wall_ns

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was moved past `seconds` from now."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._numbers), awake))
        await awake

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set, or once the clock was moved past `seconds` from now."""
        waits = [asyncio.ensure_future(self.sleep(seconds)), asyncio.ensure_future(event.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)

    @property
    def sleepers(self) -> int:
        """How many tasks wait for the clock to be moved on."""
        return sum(not awake.done() for _, _, awake in self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move the clock on by `seconds`, stopping at every deadline on the way to let that sleeper run.

        Sleepers wake in the order of their deadlines, equal ones in the order of their calls, and each reads
        its own deadline on the clock. A sleeper runs to its next wait; if that is a sleep which ends on the way, it
        wakes again. Tasks that began before the call have reached their first sleep.
        """
        assert seconds >= 0
        target_s = self._now_s + seconds
        await asyncio.sleep(0)
        while self._sleepers and self._sleepers[0][0] <= target_s:
            deadline_s, _, awake = heapq.heappop(self._sleepers)
            if awake.done():
                continue  # it was cancelled
            self._move_to(deadline_s)
            awake.set_result(None)
            await asyncio.sleep(0)
        self._move_to(target_s)

    def _move_to(self, now_s: float) -> None:
        self._wall_ns += round((now_s - self._now_s) * 1e9)
        self._now_s = now_s
