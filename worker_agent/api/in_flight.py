"""Bounds requests in flight, counts each once by outcome, and traces them.

end of the request                                       counted as
the handler answered it                                  the handler's outcome
beyond the bound: 503, to be tried again                 refused
the framework refused it (a body that is too large)      refused
the client disconnected                                  cancelled
unexpected error                                         failed
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

from aiohttp import web

from kv_runtime.http.answers import error_response
from worker_agent.api.tracing import WorkerTracer

RequestOutcome = Literal["ok", "refused", "failed", "cut", "cancelled"]
HandledRequest = tuple[web.StreamResponse, RequestOutcome]
"""An answer, and the request's outcome."""
Answering = Callable[[web.Request], Awaitable[HandledRequest]]


class InFlight:
    """The requests of one address. `running` are being served, `ended` counts the others by outcome."""

    def __init__(self, requests_max: int, tracer: WorkerTracer | None = None) -> None:
        """`tracer`: None: requests have no spans."""
        self._requests_max, self._tracer = requests_max, tracer
        self.running = 0
        self.ended: Counter[RequestOutcome] = Counter()

    async def serve(
        self, http: web.Request, answer: Callable[[web.Request], Awaitable[HandledRequest]]
    ) -> web.StreamResponse:
        """Return the response of `answer` to the request, and count the outcome."""
        if self.running >= self._requests_max:
            self.ended["refused"] += 1
            return self._overloaded()
        self.running += 1
        outcome: RequestOutcome = "failed"
        span = None if self._tracer is None or http.method != "POST" else self._tracer.begin(http)
        status = 0
        try:
            answered, outcome = await answer(http if span is None else span.http)
            status = answered.status
        except web.HTTPException as error:
            outcome, status = "refused", error.status
            raise
        except (asyncio.CancelledError, ConnectionError):
            outcome = "cancelled"
            raise
        else:
            return answered
        finally:
            self.running -= 1
            self.ended[outcome] += 1
            if span is not None and self._tracer is not None:
                self._tracer.ended(span, outcome, status)

    def _overloaded(self) -> web.Response:
        message = f"worker.inflight_requests_max: {self.running} requests are being served; try again"
        response = error_response(503, message, "server_error", code="overloaded")
        response.headers["Retry-After"] = "1"
        return response
