"""Bounds requests in flight, counts each once by outcome, traces them, and names them in the log.

end of the request                                       counted as
the handler answered it                                  the handler's outcome
beyond the bound: 503, to be tried again                 refused
the framework refused it (a body that is too large)      refused
the client disconnected                                  cancelled
unexpected error                                         failed

A log line that is written while a request is served has its `trace_id`, if the caller named a trace or this process
traces, and its `request_id`, if the router named one.

The span of a request is below the router's CLIENT span, above the engine's:

    chat {model}    SERVER    from the request's arrival to the end of its answer; in the trace that `traceparent` names

The request is passed on with a `traceparent` that names this span, so that an engine that traces puts its spans below.
Spans are sent for requests that the router sampled, and for requests that failed (`kv_runtime/tracing/spans.py`).
Source of the names: OpenTelemetry semantic conventions, "Generative AI client spans", "HTTP spans".
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from time import time_ns
from typing import Literal

from aiohttp import web
from structlog.contextvars import bound_contextvars

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.trace_context import TRACEPARENT, TRACESTATE, TraceParent, parsed_trace_parent, trace_parent
from kv_runtime.http.answers import error_response
from kv_runtime.tracing.service import Tracing
from kv_runtime.tracing.spans import Attributes, Sampling, SpanData, TraceData, text

RequestOutcome = Literal["ok", "refused", "failed", "cut", "cancelled"]
HandledRequest = tuple[web.StreamResponse, RequestOutcome]
"""An answer, and the request's outcome."""
Answer = Callable[[web.Request], Awaitable[HandledRequest]]

SERVICE = "kv-router-worker"
"""`service.name`, unless the environment names another."""

_OPERATIONS = {PATHS["completions"]: "text_completion", PATHS["embeddings"]: "embeddings"}
_CHAT = "chat"
_TRACE_ID_BITS, _SPAN_ID_BITS = 128, 64
_REQUEST_ID, _RANK = "x-request-id", "x-dp-rank"
_SERVER_FAULT = 500


class WorkerTracer:
    """Traces the requests of one worker, on its event loop. `send` gets a request's span, and does not block."""

    def __init__(
        self, sampling: Sampling, send: Callable[[TraceData], None], *, worker_id: str, role: str, model: str
    ) -> None:
        self._sampling, self._send = sampling, send
        self._attributes: Attributes = {"kvrouter.worker": worker_id, "kvrouter.role": role}
        self._model = text(model)
        self._bits = Random().getrandbits  # noqa: S311 - ids are no secrets

    def begin(self, http: web.Request) -> tuple[web.Request, Callable[[str, int], None]]:
        """Return the request with the `traceparent` of its span, and a function to call at its end.

        The function takes the outcome and the answer's status (0: the router left before it), and sends the span if
        the request was sampled or failed.
        """
        parent, began_ns = _trace_of(http), time_ns()
        trace_id = self._bits(_TRACE_ID_BITS) or 1 if parent is None else parent.trace_id
        span_id = self._bits(_SPAN_ID_BITS) or 1
        is_sampled = self._sampling.is_sampled(trace_id, parent=None if parent is None else parent.is_sampled)
        headers = http.headers.copy()
        headers[TRACEPARENT.decode()] = trace_parent(trace_id, span_id, is_sampled).decode()
        if parent is None:
            headers.popall(TRACESTATE.decode(), None)

        def ended(outcome: str, status: int) -> None:
            has_failed = outcome in ("failed", "cut") or status >= _SERVER_FAULT
            if is_sampled or self._sampling.is_kept(has_failed=has_failed, ttft_s=None):
                name, attributes = self._described(http, outcome, status)
                error = outcome if has_failed else ""
                if error:
                    attributes["error.type"] = error
                data = SpanData(name, "server", span_id, began_ns, time_ns(), attributes, error)
                self._send(TraceData(trace_id, 0 if parent is None else parent.span_id, (data,)))

        return http.clone(headers=headers), ended

    def _described(self, http: web.Request, outcome: str, status: int) -> tuple[str, Attributes]:
        """Return the span's name and attributes."""
        operation = _OPERATIONS.get(http.path, _CHAT)
        attributes = self._attributes | {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self._model,
            "http.request.method": http.method,
            "http.route": http.path,
            "kvrouter.outcome": outcome,
        }
        if status:
            attributes["http.response.status_code"] = status
        for header, name in ((_REQUEST_ID, "kvrouter.request_id"), (_RANK, "kvrouter.dp_rank")):
            if found := http.headers.get(header):
                attributes[name] = text(found)
        return f"{operation} {self._model}", attributes


class InFlight:
    """The requests of one address. `running` are being served, `ended` counts the others by outcome."""

    def __init__(self, requests_max: int, tracer: WorkerTracer | None = None) -> None:
        """`tracer` None: requests have no spans."""
        self._requests_max, self._tracer = requests_max, tracer
        self.running = 0
        self.ended: Counter[RequestOutcome] = Counter()

    @property
    def requests_total(self) -> dict[str, int]:
        """How many requests have ended, by outcome."""
        outcomes: tuple[RequestOutcome, ...] = ("ok", "refused", "failed", "cancelled")
        return {outcome: self.ended[outcome] for outcome in outcomes}

    def serving(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that answers requests by `answer`."""
        return partial(self._serve, answer)

    async def _serve(self, answer: Answer, http: web.Request) -> web.StreamResponse:
        """Return the response of `answer` to the request, and count the outcome."""
        if self.running >= self._requests_max:
            self.ended["refused"] += 1
            message = f"worker.inflight_requests_max: {self.running} requests are being served; try again"
            response = error_response(503, message, code="overloaded")
            response.headers["Retry-After"] = "1"
            return response
        self.running += 1
        outcome: RequestOutcome = "failed"
        served, ended, status = http, None, 0
        if self._tracer is not None and http.method == "POST":
            served, ended = self._tracer.begin(http)
        try:
            with bound_contextvars(**_log_names(served)):
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
            if ended is not None:
                ended(outcome, status)


def _log_names(http: web.Request) -> dict[str, str]:
    """Return the ids by which log lines of a request name it, as far as its headers have them."""
    names, parent = dict[str, str](), _trace_of(http)
    if parent is not None:
        names["trace_id"] = f"{parent.trace_id:032x}"
    if found := http.headers.get(_REQUEST_ID):
        names["request_id"] = text(found)
    return names


def _trace_of(http: web.Request) -> TraceParent | None:
    given = http.headers.get(TRACEPARENT.decode())
    return None if given is None else parsed_trace_parent(given.encode("utf-8", "surrogateescape"))


def worker_tracer(tracing: Tracing | None, worker_id: str, role: str, model: str) -> WorkerTracer | None:
    """Return the tracer of a worker's requests; None if tracing is off."""
    if tracing is None or tracing.sampling is None:
        return None
    return WorkerTracer(tracing.sampling, tracing.exporter.put, worker_id=worker_id, role=role, model=model)
