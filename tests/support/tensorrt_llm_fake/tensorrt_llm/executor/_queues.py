"""A queue that the engine's thread fills and a caller empties, with or without an event loop.

Source: `llmapi/utils.py` (AsyncQueue): a queue made where a loop runs wakes it; others block threads.
"""

import asyncio
import threading
from collections import deque
from typing import Any


class WakingQueue:
    """First in, first out; `put` from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._loop = loop
        self._event = asyncio.Event() if loop is not None else None

    def put(self, item: Any) -> None:
        """Add an item and wake the waiting readers."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
        if self._loop is not None and self._event is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    def get(self, timeout: float | None = None) -> Any:
        """Return the first item; block this thread.

        Raises:
            TimeoutError: there is none after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._items), timeout):
                raise TimeoutError
            return self._items.popleft()

    async def aget(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109  as the real one
        """Return the first item, likewise, without blocking.

        Raises:
            TimeoutError: there is none after `timeout` seconds.
        """
        assert self._event is not None
        while not self._items:
            self._event.clear()
            if not self._items:
                await asyncio.wait_for(self._event.wait(), timeout)
        return self._items.popleft()
