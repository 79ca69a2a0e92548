"""Spans on their way to a collector: what requests pay when it is away, slow or refuses, and how it is opened."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_runtime.config.loading import ConfigurationError
from kv_runtime.tracing import otlp
from kv_runtime.tracing.otlp import SpanSender
from kv_runtime.tracing.service import TracingSection, opened_tracing
from kv_runtime.tracing.spans import SpanData, TraceData
from router.request.tracing import Tracer
from tests.support.otlp_sink import OtlpSink
from tests.unit.router.plane import running_plane, until
from tests.unit.router.test_data_plane import refusing_url
from tests.unit.router.traced_plane import ALL, exporter_to, flushed
from tests.unit.router.upstream import Upstream, answers, completion

GOOD = answers(200, completion())
SPANS = 4
"""Of a request that one worker answers."""
TRACE = TraceData(1, 0, (SpanData("chat m", "server", 2, 3, 4, {}),))


async def answered_requests(exporter: SpanSender, count: int) -> None:
    """Have a plane answer so many requests, whose spans go to the exporter."""
    async with running_plane(tracer=Tracer(ALL, exporter.put)) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        for _ in range(count):
            assert (await plane.post()).status == 200
        await until(lambda: plane.serving.metrics.inflight == 0)


async def test_spans_for_a_collector_that_is_away_are_dropped_counted_and_named_in_the_log() -> None:
    exporter = exporter_to(refusing_url(), timeout_s=0.2)
    await answered_requests(exporter, 2)
    with capture_logs() as logged:
        await flushed(exporter)
    assert (exporter.sent, exporter.dropped) == (0, {"queue_full": 0, "not_sent": 2 * SPANS, "stopped": 0})
    (line,) = [line for line in logged if line["event"] == "spans_not_sent"]
    assert line["spans"] == 2 * SPANS
    assert line["reason"]


async def test_spans_that_a_collector_refuses_are_dropped_with_its_status() -> None:
    with OtlpSink(status=400) as sink, capture_logs() as logged:
        exporter = exporter_to(sink.url)
        await answered_requests(exporter, 1)
        await flushed(exporter)
    assert exporter.dropped["not_sent"] == SPANS
    assert "400" in next(line["reason"] for line in logged if line["event"] == "spans_not_sent")


async def test_a_collector_that_does_not_answer_delays_no_request_and_costs_spans_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "REQUESTS_MAX", 2)
    with OtlpSink() as sink:
        sink.answers.clear()
        exporter, stop = exporter_to(sink.url, timeout_s=60.0), asyncio.Event()
        await answered_requests(exporter, 1)
        sending = asyncio.ensure_future(exporter.part(0).run(stop))
        await asyncio.to_thread(sink.entered.wait)
        await answered_requests(exporter, 4)  # two may wait
        assert (exporter.sent, exporter.dropped) == (0, {"queue_full": 2 * SPANS, "not_sent": 0, "stopped": 0})
        sink.answers.set()
        stop.set()
        await sending
    assert exporter.sent == len(sink.spans) == 3 * SPANS


async def test_requests_that_wait_are_sent_in_batches() -> None:
    with OtlpSink() as sink:
        exporter = exporter_to(sink.url)
        for _ in range(200):
            exporter.put(TRACE)
        await flushed(exporter)
    assert (len(sink.requests), len(sink.spans), exporter.sent) == (2, 200, 200)


async def test_what_cannot_be_sent_in_the_time_of_a_stop_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LAST_S", 0.0)
    with OtlpSink() as sink:
        exporter = exporter_to(sink.url)
        exporter.put(TRACE)
        await flushed(exporter)
    assert (sink.spans, exporter.dropped["stopped"]) == ([], 1)


async def test_the_spans_of_a_drain_that_is_cut_off_are_sent() -> None:
    with OtlpSink() as sink:
        exporter = exporter_to(sink.url)
        sending = asyncio.ensure_future(exporter.part(0).run(asyncio.Event()))
        await asyncio.sleep(0)  # it waits for spans
        exporter.put(TRACE)
        sending.cancel()
        await asyncio.wait([sending])
        exporter.put(TRACE)  # of a request that ends later
    assert (sending.cancelled(), exporter.sent, exporter.dropped["stopped"]) == (True, len(sink.spans), 1)
    assert len(sink.spans) == 1


# ---------------------------------------------------------------- how it is opened

AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environ", "settings", "is_on"),
    [
        ({}, {}, False),
        (AT, {}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, {}, True),
        ({}, {"endpoint": "http://127.0.0.1:9"}, True),
        (AT | {"OTEL_SDK_DISABLED": "true"}, {}, False),
        (AT | {"OTEL_TRACES_EXPORTER": "none"}, {}, False),
        (AT | {"OTEL_TRACES_EXPORTER": "otlp"}, {}, True),
        (AT | {"OTEL_TRACES_SAMPLER": "always_off"}, {}, False),
        (AT | {"OTEL_TRACES_SAMPLER": "always_off"}, {"events_ratio": 0.5}, True),
        (AT | {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_SAMPLER": "foreign"}, {}, False),
        ({"OTEL_TRACES_SAMPLER": "foreign"}, {}, False),
        (AT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {}, True),
    ],
)
def test_tracing_is_on_where_a_collector_is_named(
    environ: dict[str, str], settings: dict[str, Any], is_on: bool
) -> None:
    assert (opened_tracing(TracingSection(**settings), environ, "r1") is not None) is is_on


def test_the_router_s_ratio_beats_the_environment_s_sampler() -> None:
    assert opened_tracing(TracingSection(), AT | {"OTEL_TRACES_SAMPLER": "always_off"}, "r1", ratio=0.5) is not None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER: found 'sometimes'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG: found '2'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}, "OTEL_TRACES_SAMPLER_ARG: found 'x'"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "x"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: found 'x'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL: found 'http/json'"),
    ],
)
def test_a_variable_that_is_wrong_is_named_at_the_start(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        opened_tracing(TracingSection(), AT | environ, "r1")


def test_grpc_without_its_package_is_refused_by_the_package_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ConfigurationError, match="opentelemetry-exporter-otlp-proto-grpc"):
        opened_tracing(TracingSection(), AT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "r1")


async def test_the_environment_names_the_collector_and_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpSink() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        tracing = opened_tracing(TracingSection(), {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url}, "r1")
        assert tracing is not None
        tracing.exporter.put(TRACE)
        await flushed(tracing.exporter)
        (span,) = sink.spans
    assert sink.paths == ["/v1/traces"]
    assert (span.service["service.name"], span.service["service.instance.id"]) == ("mine", "r1")


async def test_the_setting_s_address_wins() -> None:
    with OtlpSink() as sink:
        tracing = opened_tracing(TracingSection(endpoint=f"{sink.url}/"), AT, "r1")
        assert tracing is not None
        tracing.exporter.put(TRACE)
        await flushed(tracing.exporter)
        assert sink.paths == ["/v1/traces"]
        assert sink.spans[0].service["service.name"] == "kv-router"
