"""Traces of a fleet of real processes: the router's spans at a collector, and the trace at the worker."""

import signal

import aiohttp
import pytest

from bench.processes import FleetProcesses, FleetShape
from tests.support.otlp_sink import OtlpSink
from tests.system.e2e.client import Client
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.test_attached_engines import PROMPT, running_cluster

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.asyncio
@pytest.mark.parametrize("processes", [1, 2])
async def test_a_router_sends_the_spans_of_its_requests_before_it_ends(processes: int) -> None:
    with OtlpSink() as sink:
        settings = (*QUIET_ROUTER, f"tracing.endpoint={sink.url}", "tracing.ratio=0", f"data.processes={processes}")
        shape = FleetShape(workers=1, worker_settings=FAST_WORKER, router_settings=settings)
        async with FleetProcesses(shape) as fleet, aiohttp.ClientSession() as session:
            client = Client(session, fleet.data_url, fleet.control_url)
            for flag in ("01", "00"):
                answered = await client.complete([7] * 40, traceparent=f"00-{TRACE}-{CALLER}-{flag}")
                assert answered.status == 200
            await fleet.router.end(signal.SIGTERM)
        spans = sink.spans
    (server,) = [span for span in spans if span.kind == "server"]
    assert (server.trace_id, server.parent_id) == (TRACE, CALLER)
    assert [span.name.split()[0] for span in spans] == ["text_completion", "decide", "text_completion"]
    assert {span.parent_id for span in spans if span is not server} == {server.span_id}
    assert server.attributes["kvrouter.outcome"] == "ok"


@pytest.mark.asyncio
@pytest.mark.parametrize("ranks", [1, 2], ids=["direct", "through the agent"])
async def test_an_attached_engine_gets_the_trace_of_the_router_s_client_span(ranks: int) -> None:
    with OtlpSink() as sink:
        async with running_cluster(f"tracing.endpoint={sink.url}", va=ranks) as cluster:
            engine = cluster.attached["va"].engine
            await cluster.until_routed(PROMPT, "va", 0)
            assert (await cluster.complete(PROMPT)).status == 200
            ((_, headers, _),) = engine.requests
        (client,) = [span for span in sink.spans if span.kind == "client"]
    assert headers["traceparent"] == f"00-{client.trace_id}-{client.span_id}-01"
    assert client.attributes["gen_ai.provider.name"] == "vllm"
