"""Bounds requests in flight, counts each once by outcome, traces them, and names them in the log.

end of the request                                       counted as
the handler answered it                                  the handler's outcome
beyond the bound: 503, to be tried again                 refused
the framework refused it (a body that is too large)      refused
the client disconnected                                  cancelled
unexpected error                                         failed

A log line that is written while a request is served has its `trace_id`, if the caller named a trace or this process
traces, and its `request_id`, if the router named one.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from aiohttp import web
from structlog.contextvars import bound_contextvars

from kv_runtime.http.answers import error_response
from worker_agent.api.tracing import WorkerTracer, log_names

RequestOutcome = Literal["ok", "refused", "failed", "cut", "cancelled"]
HandledRequest = tuple[web.StreamResponse, RequestOutcome]
"""An answer, and the request's outcome."""
Answer = Callable[[web.Request], Awaitable[HandledRequest]]


class InFlight:
    """The requests of one address. `running` are being served, `ended` counts the others by outcome."""

    def __init__(self, requests_max: int, tracer: WorkerTracer | None = None) -> None:
        """`tracer`: None: requests have no spans."""
        self._requests_max, self._tracer = requests_max, tracer
        self.running = 0
        self.ended: Counter[RequestOutcome] = Counter()

    def serving(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return the handler of requests that `answer` answers."""
        return partial(self._serve, answer)

    async def _serve(self, answer: Answer, http: web.Request) -> web.StreamResponse:
        """Return the response of `answer` to the request, and count the outcome."""
        if self.running >= self._requests_max:
            self.ended["refused"] += 1
            return self._overloaded()
        self.running += 1
        outcome: RequestOutcome = "failed"
        span = None if self._tracer is None or http.method != "POST" else self._tracer.begin(http)
        served, status = http if span is None else span.http, 0
        try:
            with bound_contextvars(**log_names(served)):
                answered, outcome = await answer(served)
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
