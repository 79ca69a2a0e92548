"""Time as an argument."""

import asyncio
from contextlib import suppress
from time import monotonic, time_ns
from typing import Protocol


class Clock(Protocol):
    """The time source of shells. `now` and `sleep` use the same clock."""

    def now(self) -> float:
        """Return monotonic seconds since some moment; never less than before."""

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 in UTC; may be set back."""

    async def sleep(self, seconds: float) -> None:
        """Return when `now` has advanced by `seconds`, to within a millisecond; other tasks run once even for 0."""

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set, or after `seconds`."""


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self.now = monotonic
        """Returns the monotonic clock's seconds."""

    def wall_ns(self) -> int:
        """Return the system clock's nanoseconds since 1970."""
        return time_ns()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(max(0.0, seconds))

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await event.wait()
