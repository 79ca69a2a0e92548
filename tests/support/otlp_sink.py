"""A collector: takes OTLP over HTTP on a port that the system chose, and decodes it with the official messages."""

import gzip
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

KINDS = {
    SpanMessage.SPAN_KIND_SERVER: "server",
    SpanMessage.SPAN_KIND_INTERNAL: "internal",
    SpanMessage.SPAN_KIND_CLIENT: "client",
    SpanMessage.SPAN_KIND_PRODUCER: "producer",
    SpanMessage.SPAN_KIND_CONSUMER: "consumer",
}


class Span(NamedTuple):
    """A span as the collector got it; ids in hexadecimal, the parent's empty if there is none."""

    message: SpanMessage
    service: dict[str, object]

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return KINDS[self.message.kind]

    @property
    def trace_id(self) -> str:
        return self.message.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.message.span_id.hex()

    @property
    def parent_id(self) -> str:
        """The span above."""
        return self.message.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, object]:
        return values(self.message.attributes)

    @property
    def events(self) -> list[str]:
        """The names of its events, in order."""
        return [event.name for event in self.message.events]

    @property
    def links(self) -> list[tuple[str, object]]:
        """The spans that it is linked to, and why."""
        return [(link.span_id.hex(), values(link.attributes)["kvrouter.link"]) for link in self.message.links]

    @property
    def error(self) -> str:
        """The message of its error; empty without one."""
        return self.message.status.message


def values(attributes: Iterable[Any]) -> dict[str, object]:
    """Return attributes, which are `KeyValue` messages, as a dictionary."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class OtlpSink:
    """The collector. `status` is what it answers; while `holds` is set it answers nothing."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.entered = threading.Event()
        """Set when a request came."""
        self.answers = threading.Event()
        """Cleared: requests wait for it."""
        self.answers.set()
        sink = self

        class _Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sink.take(self)

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        self.entered.set()
        self.answers.wait()
        if handler.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.status == 200:
            self.paths.append(handler.path)
            self.requests.append(ExportTraceServiceRequest.FromString(body))
        try:
            handler.send_response(self.status)
            handler.send_header("content-length", "0")
            handler.end_headers()
        except OSError:
            handler.close_connection = True  # the exporter did not wait for it

    @property
    def spans(self) -> list[Span]:
        """All spans, as they came."""
        return [
            Span(span, values(group.resource.attributes))
            for request in self.requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
