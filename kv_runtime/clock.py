"""The clock. Code that needs the time gets a `Clock` as an argument."""

import asyncio
from contextlib import suppress
from time import monotonic, time_ns


class Clock:
    """The machine's clock. A simulation's clock overrides all its methods: `now` and `sleep` use the same time."""

    now = staticmethod(monotonic)
    """Returns monotonic seconds since some moment; never less than before."""

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 in UTC; may be set back."""
        return time_ns()

    async def sleep(self, seconds: float) -> None:
        """Return when `now` has advanced by `seconds`, to within a millisecond; other tasks run once even for 0."""
        await asyncio.sleep(max(0.0, seconds))

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await event.wait()
