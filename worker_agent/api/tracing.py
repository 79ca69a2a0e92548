"""The span of a request at its worker: below the router's CLIENT span, above the engine's.

    chat {model}    SERVER    from the request's arrival to the end of its answer; in the trace that `traceparent` names

The request goes on with a `traceparent` that names this span, so that an engine that traces puts its spans below.
Which spans are sent: as the router sampled, besides those of requests that failed (`kv_runtime/tracing/spans.py`).
Source of the names: OpenTelemetry semantic conventions, "Generative AI client spans", "HTTP spans".
"""

from collections.abc import Callable
from random import Random
from time import time_ns

from aiohttp import web

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.trace_context import TRACEPARENT, TRACESTATE, TraceParent, parsed_trace_parent
from kv_runtime.tracing.service import Tracing
from kv_runtime.tracing.spans import Attributes, Sampling, SpanData, TraceData, text

SERVICE = "kv-router-worker"
"""`service.name`, unless the environment says another."""

_OPERATIONS = {PATHS["completions"]: "text_completion", PATHS["embeddings"]: "embeddings"}
_CHAT = "chat"
_TRACE_ID_BITS, _SPAN_ID_BITS = 128, 64
_REQUEST_ID, _RANK = "x-request-id", "x-dp-rank"
_SERVER_FAULT = 500


class WorkerSpan:
    """The span of a request that is being served; `http` is the request with this span's `traceparent`."""

    def __init__(self, http: web.Request, parent: TraceParent | None, trace_id: int, span_id: int) -> None:
        self.parent, self.trace_id, self.span_id, self.began_ns = parent, trace_id, span_id, time_ns()
        self.is_sampled = False
        self.http = http


class WorkerTracer:
    """Traces the requests of one worker; for its event loop. `send` gets a request's span, and does not block."""

    def __init__(
        self, sampling: Sampling, send: Callable[[TraceData], None], *, worker_id: str, role: str, model: str
    ) -> None:
        self._sampling, self._send = sampling, send
        self._attributes: Attributes = {"kvrouter.worker": worker_id, "kvrouter.role": role}
        self._model = text(model)
        self._bits = Random().getrandbits  # noqa: S311 - ids are no secrets

    def begin(self, http: web.Request) -> WorkerSpan:
        """Return the span of a request that came; its body was not read yet."""
        parent = _trace_of(http)
        trace_id = self._bits(_TRACE_ID_BITS) or 1 if parent is None else parent.trace_id
        span = WorkerSpan(http, parent, trace_id, self._bits(_SPAN_ID_BITS) or 1)
        span.is_sampled = self._sampling.is_sampled(trace_id, parent=None if parent is None else parent.is_sampled)
        headers = http.headers.copy()
        headers[TRACEPARENT.decode()] = TraceParent(trace_id, span.span_id, span.is_sampled).header().decode()
        if parent is None:
            headers.popall(TRACESTATE.decode(), None)
        span.http = http.clone(headers=headers)
        return span

    def ended(self, span: WorkerSpan, outcome: str, status: int) -> None:
        """Hand the span over, if it is to be sent; `status` of the answer, 0: the router left before it."""
        has_failed = outcome in ("failed", "cut") or status >= _SERVER_FAULT
        if span.is_sampled or self._sampling.is_kept(has_failed=has_failed, ttft_s=None):
            parent_id = 0 if span.parent is None else span.parent.span_id
            data = self._data(span, outcome, status, error=outcome if has_failed else "")
            self._send(TraceData(span.trace_id, parent_id, (data,)))

    def _data(self, span: WorkerSpan, outcome: str, status: int, *, error: str) -> SpanData:
        http = span.http
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
        if error:
            attributes["error.type"] = error
        for header, name in ((_REQUEST_ID, "kvrouter.request_id"), (_RANK, "kvrouter.dp_rank")):
            if found := http.headers.get(header):
                attributes[name] = text(found)
        return SpanData(
            f"{operation} {self._model}", "server", span.span_id, span.began_ns, time_ns(), attributes, error
        )


def log_names(http: web.Request) -> dict[str, str]:
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
    """Return what traces the requests of a worker; None while tracing is off."""
    if tracing is None or tracing.sampling is None:
        return None
    return WorkerTracer(tracing.sampling, tracing.exporter.put, worker_id=worker_id, role=role, model=model)
