"""A data plane that traces its requests, and the collector that gets their spans."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from kv_runtime.tracing.otlp import SpanSender
from kv_runtime.tracing.spans import Sampling
from router.request.tracing import Tracer
from tests.support.otlp_sink import OtlpSink, Span
from tests.unit.router.plane import Plane, running_plane

ALL = Sampling(follows_parent=True, ratio=1.0)
NONE = Sampling(follows_parent=True, ratio=0.0)
SERVICE = {"service.name": "kv-router", "service.instance.id": "r1"}
TIMEOUT_S = 5.0


def exporter_to(url: str, *, timeout_s: float = TIMEOUT_S) -> SpanSender:
    """Return a sender that does not run yet."""
    exporter = OTLPSpanExporter(endpoint=f"{url}/v1/traces", timeout=timeout_s)
    return SpanSender(exporter, SERVICE)


async def flushed(exporter: SpanSender) -> None:
    """Send what waits, as when the process stops."""
    stop = asyncio.Event()
    stop.set()
    await exporter.part(0).run(stop)


@dataclass
class Traced:
    """A plane with its collector."""

    plane: Plane
    sink: OtlpSink
    exporter: SpanSender

    async def spans(self) -> list[Span]:
        """Return the spans of all requests so far, which have ended."""
        await flushed(self.exporter)
        return self.sink.spans


@asynccontextmanager
async def traced_plane(sampling: Sampling = ALL, **options: Any) -> AsyncIterator[Traced]:
    """Run a plane that traces by this rule."""
    with OtlpSink() as sink:
        exporter = exporter_to(sink.url)
        async with running_plane(tracer=Tracer(sampling, exporter.put), **options) as plane:
            yield Traced(plane, sink, exporter)
