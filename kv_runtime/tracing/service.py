"""Opens tracing as the configuration and the environment say; nothing of OpenTelemetry is imported while it is off."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from time import time_ns
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import Section
from kv_runtime.extras import DISTRIBUTION, install_command, missing
from kv_runtime.telemetry import Family, by_name, counter
from kv_runtime.tracing.spans import DROP_REASONS, Sampling, TraceData, sampling

if TYPE_CHECKING:
    from kv_runtime.tracing.otlp import SpanSender

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_TIMEOUT_S = 3.0
"""How long a batch may take if the environment does not say: a process that stops waits for as long."""
_EXTRA = "tracing"
_EXPORTERS = {"": "http", "http/protobuf": "http", "grpc": "grpc"}
"""The SDK's package by the protocol's name."""


class TracingSection(Section):
    """Traces, sent over OTLP. The environment's `OTEL_*` variables are read too."""

    endpoint: str = Field(
        "",
        description="a collector's address, as http://host:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT; neither: no"
        " traces",
    )
    events_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of KV event messages that are traced from the engine to the index, 0 none; set it alike in"
        " agents and routers, or traces are incomplete; more costs CPU",
    )


class EventTracing(NamedTuple):
    """Which messages of KV events are traced, and what takes their spans without blocking."""

    ratio: float
    send: Callable[[TraceData], None]
    wall_ns: Callable[[], int] = time_ns

    def is_sampled(self, trace_id: int) -> bool:
        """Return whether the message with this trace id is traced."""
        return Sampling(follows_parent=False, ratio=self.ratio).is_sampled(trace_id, parent=None)


class Tracing(NamedTuple):
    """Which requests and KV events are traced (None: none are), and what sends their spans."""

    sampling: Sampling | None
    exporter: "SpanSender"
    events: EventTracing | None = None


def opened_tracing(
    settings: TracingSection,
    environ: Mapping[str, str],
    instance: str,
    *,
    service: str = DISTRIBUTION,
    ratio: float | None = None,
    ttft_target_s: float | None = None,
    has_requests: bool = True,
) -> Tracing | None:
    """Return what samples traces and sends them; None if nothing is traced. `service` and `instance` name this process.

    `has_requests`: whether it has requests to trace; if not, it traces KV events or nothing.
    `ratio`: the share of the requests without a `traceparent`; None: as the environment says.
    `ttft_target_s`: requests whose first token came later are sent although they were not sampled; None: none are.

    Raises:
        ConfigurationError: a variable has a value that is not allowed, or a package is missing.
    """
    if not _is_wanted(settings, environ) or not (has_requests or settings.events_ratio):
        return None
    try:
        rule = sampling(environ, ratio=ratio, ttft_target_s=ttft_target_s)
    except ValueError as error:
        raise ConfigurationError([str(error)]) from error
    if rule is None and not settings.events_ratio:
        return None
    if missing(_EXTRA):
        raise ConfigurationError([f"tracing: needs {DISTRIBUTION}[{_EXTRA}]: {install_command(_EXTRA)}"])
    from kv_runtime.tracing.otlp import SpanSender  # noqa: PLC0415 - not while tracing is off

    variable = next((name for name in _PROTOCOLS if environ.get(name)), "")
    protocol = environ.get(variable, "").strip().lower()
    if protocol not in _EXPORTERS:
        raise ConfigurationError([f"{variable}: found {protocol[:64]!r}, allowed http/protobuf, grpc"])
    endpoint = settings.endpoint or None
    if endpoint and _EXPORTERS[protocol] == "http":
        endpoint = f"{endpoint.removesuffix('/')}/v1/traces"
    described = {
        "service.name": service,
        "service.instance.id": instance,
        "service.version": version(DISTRIBUTION),
    }
    try:
        exporters = import_module(f"opentelemetry.exporter.otlp.proto.{_EXPORTERS[protocol]}.trace_exporter")
    except ImportError as error:
        name = "opentelemetry-exporter-otlp-proto-grpc"
        raise ConfigurationError([f"{variable}: grpc needs the package {name}: {error}"]) from error
    timeout_s = None if _first(environ, _TIMEOUTS) else _TIMEOUT_S
    exporter = SpanSender(exporters.OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s), described)
    events = EventTracing(settings.events_ratio, exporter.put) if settings.events_ratio else None
    return Tracing(rule, exporter, events)


def events_of(tracing: Tracing | None) -> EventTracing | None:
    """Return what traces KV events; None while that is off."""
    return None if tracing is None else tracing.events


def _is_wanted(settings: TracingSection, environ: Mapping[str, str]) -> bool:
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_elsewhere = environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in ("", "otlp")
    return bool(settings.endpoint or _first(environ, _ENDPOINTS)) and not is_off and not is_elsewhere


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def span_families(exporter: "SpanSender | None") -> Iterator[Family]:
    """Yield the metrics of spans; None: tracing is off, and all are 0."""
    sent, dropped = (0, dict.fromkeys(DROP_REASONS, 0)) if exporter is None else (exporter.sent, exporter.dropped)
    yield counter("spans_sent", "Spans that the collector took; 0 while tracing is off", (), [((), sent)])
    meaning = "Spans that were to be sent and were not"
    yield counter("spans_dropped", meaning, ("reason",), by_name((), dropped))
