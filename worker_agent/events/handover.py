"""A queue from one thread to the event loop, bounded by the weight of its entries; nothing is lost in it.

put     the thread waits while the waiting entries weigh `weight_max` or more; so one entry of any weight passes
next    the event loop, which is never blocked
close   the event loop takes nothing more: a waiting `put` returns, and entries are dropped
"""

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """The queue. Made on the event loop that takes from it."""

    def __init__(self, weight_max: int) -> None:
        self._weight_max = weight_max
        self._loop = asyncio.get_running_loop()
        self._has_entry = asyncio.Event()
        self._changed = threading.Condition()
        self._entries: deque[tuple[T, int]] = deque()
        self._weight = 0
        self._is_closed = False

    def put(self, entry: T, weight: int = 0) -> None:
        """Append an entry; belongs to the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._weight < self._weight_max or self._is_closed)
            if self._is_closed:
                return
            self._entries.append((entry, weight))
            self._weight += weight
        self._loop.call_soon_threadsafe(self._has_entry.set)

    async def next(self) -> T:
        """Remove and return the oldest entry, once there is one."""
        while not self._entries:
            self._has_entry.clear()  # an entry of this moment sets it later: `put` calls the loop after it appended
            await self._has_entry.wait()
        with self._changed:
            entry, weight = self._entries.popleft()
            self._weight -= weight
            self._changed.notify()
        return entry

    def close(self) -> None:
        """Drop what waits, and what comes."""
        with self._changed:
            self._is_closed = True
            self._entries.clear()
            self._changed.notify()
