"""A collector that is not ours, `rotel`, takes the spans of a real request and passes them on as they were.

It is skipped where these are not installed: `pip install --pre rotel`, and for gRPC
`pip install opentelemetry-exporter-otlp-proto-grpc`.
"""

import asyncio
import importlib.util
import signal
from pathlib import Path

import aiohttp
import pytest

from bench.ports import free_ports
from bench.processes import FleetProcesses, FleetShape
from kv_runtime.clock import SystemClock
from tests.support.otlp_sink import OtlpSink
from tests.system.e2e.client import Client
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.faults.children import Children

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAMES = {"text_completion sim-8b", "prompt", "decide"}
WAIT_S, LOOK_S = 20.0, 0.05
_ROTEL = importlib.util.find_spec("rotel")
_GRPC = "opentelemetry.exporter.otlp.proto.grpc"


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


async def start_collector(children: Children, sink: OtlpSink) -> dict[str, str]:
    """Return the addresses of a collector that passes everything on to `sink`, by protocol."""
    assert _ROTEL is not None
    assert _ROTEL.origin is not None
    program = Path(_ROTEL.origin).with_name("rotel-agent")
    http, grpc = (f"127.0.0.1:{port}" for port in free_ports(2))
    received = ("--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc)
    sent = ("--exporter", "otlp", "--otlp-exporter-endpoint", sink.url, "--otlp-exporter-protocol", "http")
    await children.start("rotel", [str(program), "start", *received, *sent], ready="")
    await until_open(http)
    return {"http/protobuf": f"http://{http}", "grpc": f"http://{grpc}"}


async def until_open(address: str) -> None:
    host, _, port = address.partition(":")
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await SystemClock().sleep(LOOK_S)
            else:
                writer.close()
                return


@pytest.mark.skipif(_ROTEL is None, reason="rotel is not installed: pip install --pre rotel")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_foreign_collector_takes_the_spans_of_a_request(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if protocol == "grpc" and not is_installed(_GRPC):
        pytest.skip("opentelemetry-exporter-otlp-proto-grpc is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with OtlpSink() as sink:
        async with Children() as children, aiohttp.ClientSession() as session:
            addresses = await start_collector(children, sink)
            settings = (*QUIET_ROUTER, f"tracing.endpoint={addresses[protocol]}", "tracing.ratio=0")
            shape = FleetShape(workers=1, worker_settings=FAST_WORKER, router_settings=settings)
            async with FleetProcesses(shape) as fleet:
                client = Client(session, fleet.data_url, fleet.control_url)
                answered = await client.complete([7] * 40, traceparent=f"00-{TRACE}-{CALLER}-01")
                assert answered.status == 200
                await fleet.router.end(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while len(sink.spans) < len(NAMES) + 1:
                    await SystemClock().sleep(LOOK_S)
        spans = sink.spans
    assert {span.name for span in spans} == NAMES
    (server,) = [span for span in spans if span.kind == "server"]
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, CALLER), (TRACE, server.span_id)}
    assert {str(span.service["service.name"]) for span in spans} == {"kv-router"}
    (client_span,) = [span for span in spans if span.kind == "client"]
    assert client_span.attributes["kvrouter.worker"] == "w0"
    assert client_span.events[-1] == "last_token"
