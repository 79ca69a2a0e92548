"""Sends spans with OpenTelemetry's SDK, over HTTP or gRPC: the one module that imports it.

Address, headers, certificates, compression and timeout are those of `OTEL_EXPORTER_OTLP_*`, read by the SDK; its name
for this process is that of `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`. Source: OpenTelemetry specification,
"OpenTelemetry Protocol Exporter".
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kv_runtime.tracing.spans import SpanData, TraceData

_GRPC = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_SCOPE = "kv_router"


class _LastWords(logging.Handler):
    """Keeps the newest line that the SDK logs: the reason of a failure, which it does not return."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.line = record.getMessage()

    def taken(self) -> str:
        """Return the line, and forget it."""
        line, self.line = self.line, ""
        return line


class OtlpSender:
    """Sends spans to one collector; for one thread. It takes over the log of the SDK's exporters."""

    def __init__(self, exporter: SpanExporter, service: Mapping[str, str]) -> None:
        """`service` describes this process where the environment does not."""
        self._exporter = exporter
        stated = OTELResourceDetector().detect().attributes
        self._resource = Resource.create({name: value for name, value in service.items() if name not in stated})
        self._scope = InstrumentationScope(_SCOPE, service.get("service.version"))
        self._words = _LastWords()
        log = logging.getLogger("opentelemetry.exporter")
        log.handlers, log.propagate = [self._words], False

    def send(self, traces: Sequence[TraceData]) -> str:
        """Send the spans; return why the collector has not got them."""
        spans = [span for trace in traces for span in self._readable(trace)]
        result = self._exporter.export(spans)
        words = self._words.taken()
        return "" if result is SpanExportResult.SUCCESS else words or "the collector did not take them"

    def close(self) -> None:
        """Close the exporter's connections."""
        self._exporter.shutdown()

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


def http_exporter(endpoint: str, timeout_s: float | None) -> SpanExporter:
    """Return an exporter over HTTP; empty and None: as the environment says, or the SDK's defaults."""
    url = f"{endpoint.removesuffix('/')}/v1/traces" if endpoint else None
    # The type of `timeout` was int in older releases; any number is taken.
    return OTLPSpanExporter(endpoint=url, timeout=timeout_s)


def grpc_exporter(endpoint: str, timeout_s: float | None) -> SpanExporter:
    """Return an exporter over gRPC, likewise; raise `ImportError` if its package is not installed."""
    exporter: SpanExporter = import_module(_GRPC).OTLPSpanExporter(endpoint=endpoint or None, timeout=timeout_s)
    return exporter


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))
