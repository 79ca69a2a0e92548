"""Sends spans to the collector with OpenTelemetry's SDK, from a thread of its own: the one module that imports the SDK.

put      takes the spans of one request; they are dropped if `REQUESTS_MAX` requests wait already
run      a thread sends the waiting spans in batches; the SDK's exporter retries, and then a batch that the collector
         has not taken is dropped
stop     sending continues for `LAST_S`, even if the drain is cut off; spans that still wait then are dropped

A collector that is away, slow or refuses costs requests nothing: spans are dropped and counted. The SDK's own batch
processor is not used: it does not count what it drops, and wants the SDK's spans, 27 us of the event loop each.

The SDK reads address, headers, certificates, compression and timeout from `OTEL_EXPORTER_OTLP_*`, and the process's
name from `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`. Source: OpenTelemetry specification, "OpenTelemetry
Protocol Exporter".
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial

import structlog
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kv_runtime.clock import Clock
from kv_runtime.supervise import Part, SupervisedWork
from kv_runtime.telemetry import RateLimitedLog
from kv_runtime.tracing.spans import DROP_REASONS, SpanData, TraceData

REQUESTS_MAX = 2048
"""How many ended requests may wait to be sent: some MB of spans. The SDK's own queue holds as many spans."""
BATCH_REQUESTS = 128
"""Requests in a batch: they have about 512 spans, as the SDK's batches do."""
LAST_S = 2.0
"""How long a process that stops continues to send."""
PERIOD_S = 0.2
"""How long spans wait for others of their batch."""
_JOIN_S = 15.0
"""How long a sender that is cut off waits for the collector: longer than the SDK's timeout of 10 s."""
_SCOPE = "kv_router"

_log = structlog.get_logger("tracing")


class _LastWords(logging.Handler):
    """Keeps the newest line that the SDK logs: the reason of a failure, which its exporters do not return."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.line = record.getMessage()


class SpanSender:
    """The queue, and the work that empties it. It takes over the log of the SDK's exporters."""

    def __init__(self, exporter: SpanExporter, service: Mapping[str, str]) -> None:
        """`service` describes this process if the environment does not."""
        self._exporter, self._clock = exporter, Clock()
        self._work = SupervisedWork("span-exporter", self._run, join_s=_JOIN_S)
        stated = OTELResourceDetector().detect().attributes
        self._resource = Resource.create({name: value for name, value in service.items() if name not in stated})
        self._scope = InstrumentationScope(_SCOPE, service.get("service.version"))
        self._waiting: deque[TraceData] = deque()
        self._has_ended = False
        self.sent, self.dropped = 0, dict.fromkeys(DROP_REASONS, 0)
        """Spans that the collector took; dropped spans by reason."""
        self._failures, self._words = RateLimitedLog(_log, self._clock), _LastWords(logging.WARNING)
        log = logging.getLogger("opentelemetry.exporter")
        log.handlers, log.propagate = [self._words], False

    def put(self, trace: TraceData) -> None:
        """Hand over the spans of a request; never blocks."""
        if self._has_ended:
            self.dropped["stopped"] += len(trace.spans)
        elif len(self._waiting) >= REQUESTS_MAX:
            self.dropped["queue_full"] += len(trace.spans)
        else:
            self._waiting.append(trace)

    def part(self, stage: int) -> Part:
        """Return the work as a part of the process: it sends what is put until stop is set, and then the rest."""
        return self._work.part(stage=stage)

    async def _run(self, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                await self._clock.wait(stop, PERIOD_S)
                while self._waiting and not stop.is_set():
                    await self._send_batch()
        except asyncio.CancelledError:  # the drain was cut off: its requests' spans are sent, too
            await self._send_last()
            raise
        await self._send_last()

    async def _send_last(self) -> None:
        ends_s = self._clock.now() + LAST_S
        try:
            while self._waiting and self._clock.now() < ends_s:
                await self._send_batch()
        finally:
            self._has_ended = True
            self.dropped["stopped"] += sum(len(trace.spans) for trace in self._waiting)
            self._waiting.clear()
            self._exporter.shutdown()

    async def _send_batch(self) -> None:
        traces = [self._waiting.popleft() for _ in range(min(BATCH_REQUESTS, len(self._waiting)))]
        await self._work.call(partial(self._send, traces))

    def _send(self, traces: list[TraceData]) -> None:
        spans = [span for trace in traces for span in self._readable(trace)]
        self._words.line = ""
        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            reason = self._words.line or "the collector did not take them"
        except Exception as error:  # noqa: BLE001 - the edge: whatever a collector does, requests go on
            is_sent, reason = False, f"{type(error).__name__}: {error}"
        if is_sent:
            self.sent += len(spans)
        else:
            self.dropped["not_sent"] += len(spans)
            self._failures.warning("spans_not_sent", spans=len(spans), reason=reason[:500])

    def _readable(self, trace: TraceData) -> Iterator[ReadableSpan]:
        above = _context(trace.trace_id, trace.parent_id, is_remote=True) if trace.parent_id else None
        for span in trace.spans:
            context = _context(trace.trace_id, span.span_id)
            yield self._span(span, context, above)
            if span is trace.spans[0]:
                above = context

    def _span(self, span: SpanData, context: SpanContext, parent: SpanContext | None) -> ReadableSpan:
        links = [Link(_context(context.trace_id, link.span_id), {"kvrouter.link": link.why}) for link in span.links]
        return ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, timestamp=event.at_ns) for event in span.events],
            links=links,
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))
