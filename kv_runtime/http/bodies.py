"""A time limit for the body of a request to an aiohttp server.

After `BODY_S`, `RATE_MIN_BYTES_S` must have come for each further second; all must come within `TOTAL_S`. Else the
request gets 408.
"""

import asyncio

from aiohttp import StreamReader

BODY_S = 30.0
RATE_MIN_BYTES_S = 500.0
TOTAL_S = 300.0


class BodyTooSlow(Exception):
    """A request's body did not come in time."""


class BodyWatch:
    """Watches a body from its head on; reading a body that is too slow raises `BodyTooSlow`."""

    def __init__(self, body: StreamReader) -> None:
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Check the body's time limit, now and at its deadline."""
        if self._body.is_eof():
            return
        found = self._body.total_bytes
        due_s = self._began_s + min(TOTAL_S, BODY_S + found / RATE_MIN_BYTES_S)
        if due_s > self._loop.time():
            self._timer = self._loop.call_at(due_s, self.look)
            return
        took_s = self._loop.time() - self._began_s
        allowed = f"{RATE_MIN_BYTES_S:g} a second after {BODY_S:g} s, and {TOTAL_S:g} s in all"
        self._body.set_exception(BodyTooSlow(f"body: found {found} bytes within {took_s:.0f} s, allowed {allowed}"))

    def stop(self) -> None:
        """End the watch."""
        if self._timer is not None:
            self._timer.cancel()
