"""Checks the timeouts of many connections with one timer.

Every connection is checked once a period, if it is due. Connections are spread over slots, and each tick checks one
slot, so that thousands of connections never block the loop for long. Without connections there is no timer.
"""

import asyncio
import itertools
from typing import Protocol

SLOTS = 8


class Watched(Protocol):
    """An object with timeouts."""

    due_s: float
    """No check is needed before this time."""

    def check_timeouts(self, now_s: float) -> None:
        """Act on all timeouts that are overdue at `now_s`, by the loop's clock."""


class TimeoutSweeper:
    """Checks the timeouts of all watched objects from `start` to `stop`."""

    def __init__(self, period_s: float) -> None:
        self._tick_s = period_s / SLOTS
        self._slots: tuple[set[Watched], ...] = tuple(set() for _ in range(SLOTS))
        self._slot_cycle = itertools.cycle(self._slots)
        self._next = itertools.cycle(self._slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._slots))

    def start(self) -> None:
        """Start checking."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Stop checking."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def add(self, watched: Watched) -> set[Watched]:
        """Watch one more object; return its slot, from which its owner discards it when it is over."""
        slot = next(self._next)
        slot.add(watched)
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        return slot

    def _tick(self) -> None:
        loop, self._timer = self._loop, None
        if loop is None or not any(self._slots):
            return
        self._timer = loop.call_later(self._tick_s, self._tick)
        now_s = loop.time()
        for watched in tuple(next(self._slot_cycle)):
            if watched.due_s <= now_s:
                watched.check_timeouts(now_s)
