"""Traces of a fleet of real processes: the router's spans at a collector, and the trace at the worker."""

import signal

import pytest

from bench.processes import FleetShape
from tests.support.otlp_sink import OtlpSink, Span
from tests.system.e2e.client import fleet_of
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER
from tests.system.e2e.test_attached_engines import PROMPT, running_cluster

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_router_sends_the_spans_of_its_requests_before_it_ends(processes: int) -> None:
    with OtlpSink() as sink:
        settings = (*QUIET_ROUTER, f"tracing.endpoint={sink.url}", "tracing.ratio=0", f"data.processes={processes}")
        shape = FleetShape(workers=1, worker_settings=FAST_WORKER, router_settings=settings)
        async with fleet_of(shape) as (fleet, client):
            for flag in ("01", "00"):
                answered = await client.complete([7] * 40, traceparent=f"00-{TRACE}-{CALLER}-{flag}")
                assert answered.status == 200
            await fleet.router.end(signal.SIGTERM)
        spans = sink.spans
    (server,) = [span for span in spans if span.kind == "server"]
    assert (server.trace_id, server.parent_id) == (TRACE, CALLER)
    assert [span.name.split()[0] for span in spans] == ["text_completion", "prompt", "decide", "text_completion"]
    assert {span.parent_id for span in spans if span is not server} == {server.span_id}
    assert server.attributes["kvrouter.outcome"] == "ok"


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


async def test_the_spans_of_router_prefill_and_decode_workers_are_one_tree() -> None:
    with OtlpSink() as sink:
        tracing = f"tracing.endpoint={sink.url}"
        shape = FleetShape(
            workers=0,
            prefill=1,
            decode=1,
            worker_settings=(*FAST_WORKER, tracing),
            router_settings=(*QUIET_ROUTER, tracing),
        )
        async with fleet_of(shape) as (fleet, client):
            answered = await client.complete([7] * 40, max_tokens=4, traceparent=f"00-{TRACE}-{CALLER}-01")
            assert answered.status == 200
            for process in (fleet.router, *fleet.workers.values()):
                await process.end(signal.SIGTERM)
        spans = {span.span_id: span for span in sink.spans if span.kind != "internal"}

    def path(span: Span) -> list[object]:
        above = spans.get(span.parent_id)
        own = span.attributes.get("kvrouter.role") or f"{span.kind} {span.name.partition(' ')[0]}"
        return [*([span.parent_id] if above is None else path(above)), own]

    request = [CALLER, "server text_completion"]
    leaves = [path(span) for span in spans.values() if "kvrouter.role" in span.attributes]
    assert sorted(map(str, leaves)) == sorted(
        map(str, [[*request, "client prefill", "prefill"], [*request, "client decode", "decode"]])
    )
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert {span.service["service.name"] for span in spans.values()} == {"kv-router", "kv-router-worker"}
