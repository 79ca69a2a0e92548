"""Bounds requests in flight, and counts once how each ended.

how it ended                                             counted as
its answer was made                                      what whoever made it says
beyond the bound: 503, to be tried again                 refused
the framework refuses it (a body that is too large)      refused
the client went away                                     cancelled
an error that nobody expected                            failed
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

from aiohttp import web

from kv_runtime.http import error_response

RequestOutcome = Literal["ok", "refused", "failed", "cut", "cancelled"]
HandledRequest = tuple[web.StreamResponse, RequestOutcome]
"""An answer, and how the request ended."""
Answering = Callable[[web.Request], Awaitable[HandledRequest]]


class InFlight:
    """The requests of one address. `running` are being served, `ended` counts the others."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self.running = 0
        self.ended: Counter[RequestOutcome] = Counter()

    async def serve(
        self, http: web.Request, answer: Callable[[web.Request], Awaitable[HandledRequest]]
    ) -> web.StreamResponse:
        """Return what `answer` makes of the request, which is counted, however it ends."""
        if self.running >= self._requests_max:
            self.ended["refused"] += 1
            return self._overloaded()
        self.running += 1
        outcome: RequestOutcome = "failed"
        try:
            answered, outcome = await answer(http)
        except web.HTTPException:
            outcome = "refused"
            raise
        except (asyncio.CancelledError, ConnectionError):
            outcome = "cancelled"
            raise
        else:
            return answered
        finally:
            self.running -= 1
            self.ended[outcome] += 1

    def _overloaded(self) -> web.Response:
        message = f"worker.inflight_requests_max: {self.running} requests are being served; try again"
        response = error_response(503, message, "server_error", code="overloaded")
        response.headers["Retry-After"] = "1"
        return response
