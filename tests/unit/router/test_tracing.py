"""Spans of requests, as a collector decodes them: one tree a request, with what its parts say."""

import json
from time import perf_counter
from typing import Any, cast

import pytest

from kv_protocol.trace_context import parsed_trace_parent, trace_parent
from kv_runtime.tracing.spans import Sampling, TraceData
from router.http.exchange import Exchange
from router.request import tracing
from router.request.request import Request
from router.request.tracing import RequestTrace, Tracer
from tests.support.otlp_sink import OtlpSink, Span
from tests.unit.router.plane import CHAT, PROMPT, until
from tests.unit.router.role_workers import RoleWorker, streamed_text, text_of
from tests.unit.router.samples import MODEL
from tests.unit.router.test_disaggregated import BODY, fleet
from tests.unit.router.traced_plane import ALL, NONE, Traced, exporter_to, flushed, traced_plane
from tests.unit.router.upstream import DONE, Upstream, answers, completion, event, says_and_waits, streams

GOOD = answers(200, completion())
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


def one_tree(spans: list[Span]) -> tuple[Span, list[Span], list[Span]]:
    """Return the SERVER span, the decisions and the CLIENT spans of one request, which are its children.

    The others are `prompt`, first, and `queue`.
    """
    (server,) = [span for span in spans if span.kind == "server"]
    rest = [span for span in spans if span is not server]
    assert {span.trace_id for span in spans} == {server.trace_id}
    assert {span.parent_id for span in rest} <= {server.span_id}
    assert len({span.span_id for span in spans}) == len(spans)
    for span in spans:
        assert 0 < span.message.start_time_unix_nano <= span.message.end_time_unix_nano
        assert server.message.start_time_unix_nano <= span.message.start_time_unix_nano
        assert span.message.end_time_unix_nano <= server.message.end_time_unix_nano
    assert {span.name for span in rest if span.kind == "internal"} <= {"prompt", "queue", "decide"}
    decisions = [span for span in rest if span.name == "decide"]
    return server, decisions, [span for span in rest if span.kind == "client"]


async def tree(traced: Traced) -> tuple[Span, list[Span], list[Span]]:
    await until(lambda: traced.plane.serving.metrics.inflight == 0)
    return one_tree(await traced.spans())


# ---------------------------------------------------------------- one request


async def test_a_request_is_a_server_span_with_its_decision_and_its_upstream_request() -> None:
    async with traced_plane() as traced, Upstream(GOOD) as worker:
        traced.plane.join("w0", worker.base_url, holds=3, event_source="vllm")
        port = int(worker.base_url.rpartition(":")[2])
        answered = await traced.plane.post(x_request_id="r1")
        server, (decision,), (client,) = await tree(traced)
    assert (server.name, decision.name, client.name) == (
        f"text_completion {MODEL}",
        "decide",
        f"text_completion {MODEL}",
    )
    assert server.parent_id == ""
    assert server.service["service.name"] == "kv-router"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kv_router",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 64,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 48,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "kvrouter.request_id": "r1",
        "kvrouter.outcome": "ok",
        "kvrouter.mode": "kv",
        "kvrouter.retries": 0,
    }
    assert expected.items() <= server.attributes.items()
    decided = {
        "kvrouter.decision_id": answered.headers["x-decision-id"],
        "kvrouter.policy": "kv",
        "kvrouter.worker": "w0",
        "kvrouter.trust": "EXACT",
        "kvrouter.overlap_blocks": 3,
        "kvrouter.candidates": 1,
    }
    assert decided.items() <= decision.attributes.items()
    cost = traced.plane.routing.decisions.newest(1)[0].decision.chosen.terms
    assert decision.attributes["kvrouter.cost.prefill_ms"] == cost.prefill_ms
    assert decision.attributes["kvrouter.cost.cost"] == cost.cost
    sent = {
        "gen_ai.provider.name": "vllm",
        "server.address": "127.0.0.1",
        "server.port": port,
        "http.response.status_code": 200,
        "kvrouter.outcome": "ok",
        "kvrouter.worker": "w0",
    }
    assert sent.items() <= client.attributes.items()
    assert client.message.start_time_unix_nano >= decision.message.end_time_unix_nano
    assert not server.error
    assert not client.error


@pytest.mark.parametrize(
    ("waited_s", "shown_s"),
    [
        pytest.param(2.0, [2.0], id="it waited"),
        pytest.param(20.0, [3.0], id="longer than the request is old, by another clock"),
        pytest.param(0.0, [], id="it did not wait"),
    ],
)
def test_the_wait_in_the_queue_is_a_span(waited_s: float, shown_s: list[float]) -> None:
    sent, began_s = list[TraceData](), perf_counter() - 3.0
    trace = RequestTrace(Tracer(ALL, sent.append, "https"), {}, began_s)
    trace.was_in("queue", waited_s)
    exchange = Exchange(None, "GET", "/v1/completions", "", {}, b"", began_s)
    assert trace.ended(Request(exchange, cast("Any", None)), "ok", None)
    server, *rest = sent[0].spans
    assert (server.attributes["http.request.method"], server.attributes["url.scheme"]) == ("GET", "https")
    assert [span.name for span in rest] == ["queue"] * len(shown_s)
    expected = pytest.approx(shown_s, abs=0.5)
    assert [(span.end_ns - span.start_ns) / 10**9 for span in rest] == expected
    assert [server.attributes[name] for name in server.attributes if name == "kvrouter.queue_wait_s"] == expected


def test_spans_have_their_length_though_the_systems_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, began_s = list[TraceData](), perf_counter()
    trace = RequestTrace(Tracer(ALL, sent.append), {}, began_s)
    monkeypatch.setattr(tracing, "time_ns", lambda: 0)
    trace.was_in("queue", 1.0)
    trace.deciding()
    trace.decided(None, "no_worker")
    exchange = Exchange(None, "GET", "/v1/completions", "", {}, b"", began_s)
    assert trace.ended(Request(exchange, cast("Any", None)), "refused", None)
    server, queue, decision = sent[0].spans
    assert server.start_ns == queue.start_ns < queue.end_ns <= decision.start_ns <= decision.end_ns <= server.end_ns


async def test_a_chat_is_named_so_and_its_stream_has_both_tokens_as_events() -> None:
    async with traced_plane() as traced, Upstream(streams(event("a"), event("b"), DONE)) as worker:
        traced.plane.join("w0", worker.base_url)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        await traced.plane.post(json.dumps(body).encode(), CHAT)
        server, _, (client,) = await tree(traced)
    assert (server.name, client.name) == (f"chat {MODEL}", f"chat {MODEL}")
    assert client.events == ["first_token", "last_token"]
    first, last = (each.time_unix_nano for each in client.message.events)
    assert client.message.start_time_unix_nano <= first <= last == client.message.end_time_unix_nano
    assert "kvrouter.ttft_s" in server.attributes


# ---------------------------------------------------------------- the trace of the caller, and the engine's


async def test_the_worker_gets_the_trace_of_the_client_span_and_the_caller_is_the_parent() -> None:
    async with traced_plane() as traced, Upstream(GOOD) as worker:
        traced.plane.join("w0", worker.base_url)
        await traced.plane.post(traceparent=SAMPLED, tracestate="a=b")
        server, _, (client,) = await tree(traced)
        headers = worker.received[0].headers
    assert (server.trace_id, server.parent_id) == (TRACE, CALLER)
    assert headers["traceparent"] == f"00-{TRACE}-{client.span_id}-01"
    assert headers["tracestate"] == "a=b"


@pytest.mark.parametrize(
    "given",
    [
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{TRACE}-{CALLER}-01-more",
        f"00-{TRACE.upper()}-{CALLER}-01",
        "x" * 4096,
    ],
)
async def test_an_invalid_trace_is_replaced_by_a_new_one_and_its_state_dropped(given: str) -> None:
    async with traced_plane() as traced, Upstream(GOOD) as worker:
        traced.plane.join("w0", worker.base_url)
        await traced.plane.post(traceparent=given, tracestate="a=b")
        server, _, (client,) = await tree(traced)
        headers = worker.received[0].headers
    sent = parsed_trace_parent(headers["traceparent"].encode())
    assert sent is not None
    assert f"{sent.trace_id:032x}" == server.trace_id != TRACE
    assert f"{sent.span_id:016x}" == client.span_id
    assert server.parent_id == ""
    assert "tracestate" not in headers


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known() -> None:
    found = parsed_trace_parent(f"01-{TRACE}-{CALLER}-03-more".encode())
    assert found is not None
    assert trace_parent(*found).decode() == SAMPLED


# ---------------------------------------------------------------- several upstream requests


async def test_a_retried_request_has_a_turn_for_each_worker_and_a_link_to_the_one_before() -> None:
    async with traced_plane() as traced, Upstream(answers(500)) as bad, Upstream(GOOD) as good:
        traced.plane.join("w0", bad.base_url, holds=3)
        traced.plane.join("w1", good.base_url)
        answered = await traced.plane.post()
        server, decisions, (first, second) = await tree(traced)
        received = [each.received[0].headers["traceparent"] for each in (bad, good)]
    assert answered.status == 200
    assert [span.attributes["kvrouter.worker"] for span in decisions] == ["w0", "w1"]
    assert [f"00-{server.trace_id}-{span.span_id}-01" for span in (first, second)] == received
    assert (first.error, first.attributes["error.type"]) == ("first_byte: status 500", "first_byte")
    assert first.attributes["http.response.status_code"] == 500
    assert second.links == [(first.span_id, "retry")]
    assert (server.attributes["kvrouter.retries"], server.error) == (1, "")


async def test_a_migrated_stream_has_a_turn_for_each_worker_and_a_link_to_the_one_before() -> None:
    with OtlpSink() as sink:
        exporter = exporter_to(sink.url)
        async with fleet("aggregated", "aggregated", tracer=Tracer(ALL, exporter.put)) as found:
            for worker in found.workers.values():
                worker.cut_after = 2
            found.workers["a1"].cut_after = None
            found.plane.index.held = {rank: 3 * (rank.worker_id == "a0") for rank in found.plane.index.held}
            answered = await found.plane.post(BODY)
            assert streamed_text(answered.body) == text_of(PROMPT, 6)
            assert found.reroutes() == {"migrated": 1}
        await flushed(exporter)
        server, decisions, (first, second) = one_tree(sink.spans)
    assert len(decisions) == 2
    assert (first.events, second.events) == (["first_token"], ["first_token", "last_token"])
    assert first.attributes["error.type"] == "body"
    assert second.links == [(first.span_id, "migration")]
    assert (server.attributes["kvrouter.migrations"], server.attributes["kvrouter.outcome"]) == (1, "ok")


async def test_prefill_and_decode_are_two_client_spans_and_each_worker_gets_its_own() -> None:
    seen: list[str] = []

    async def noted(exchange: Any, worker: RoleWorker) -> None:
        seen.append(exchange.received.headers["traceparent"])
        await worker(exchange)

    async with traced_plane() as traced:
        prefill, decode = RoleWorker("prefill"), RoleWorker("decode")
        async with Upstream(lambda at: noted(at, prefill)) as p0, Upstream(lambda at: noted(at, decode)) as d1:
            traced.plane.join("p0", p0.base_url, role="prefill")
            traced.plane.join("d1", d1.base_url, role="decode")
            answered = await traced.plane.post(BODY)
            server, decisions, (first, second) = await tree(traced)
    assert streamed_text(answered.body) == text_of(PROMPT, 6)
    assert [span.attributes["kvrouter.phase"] for span in decisions] == ["prefill", "decode"]
    assert (first.name, second.name) == (f"prefill {MODEL}", f"decode {MODEL}")
    assert second.links == [(first.span_id, "handoff")]
    assert seen == [f"00-{server.trace_id}-{span.span_id}-01" for span in (first, second)]


# ---------------------------------------------------------------- errors and hostile clients


async def test_a_request_without_a_worker_ends_with_an_error_and_no_upstream_request() -> None:
    async with traced_plane(NONE) as traced:
        traced.plane.join("w0", "http://127.0.0.1:9", max_seq_len=8)
        traced.plane.join("w1", "http://127.0.0.1:9", drained=True)
        answered = await traced.plane.post()
        assert answered.status == 503
        server, (decision,), clients = await tree(traced)
    assert clients == []
    assert server.attributes["http.response.status_code"] == 503
    assert server.error == server.attributes["error.type"] == decision.error == answered.error["code"]


async def test_a_client_that_leaves_is_no_error() -> None:
    async with traced_plane() as traced, Upstream(says_and_waits(b"")) as worker:
        traced.plane.join("w0", worker.base_url)
        _, writer = await traced.plane.dial()
        await until(lambda: bool(worker.received))
        writer.close()
        server, _, (client,) = await tree(traced)
    assert server.attributes["kvrouter.outcome"] == client.attributes["kvrouter.outcome"] == "cancelled"
    assert "http.response.status_code" not in server.attributes
    assert not server.error
    assert not client.error


# ---------------------------------------------------------------- which are sent


@pytest.mark.parametrize(
    ("sampling", "given", "sent"),
    [
        (ALL, "", True),
        (ALL, UNSAMPLED, False),
        (NONE, "", False),
        (NONE, SAMPLED, True),
        (Sampling(follows_parent=False, ratio=1.0), UNSAMPLED, True),
    ],
)
async def test_a_request_is_sampled_as_its_caller_says_or_by_the_ratio(
    sampling: Sampling, given: str, sent: bool
) -> None:
    async with traced_plane(sampling) as traced, Upstream(GOOD) as worker:
        traced.plane.join("w0", worker.base_url)
        await traced.plane.post(**({"traceparent": given} if given else {}))
        await until(lambda: traced.plane.serving.metrics.inflight == 0)
        assert bool(await traced.spans()) is sent
        assert worker.received[0].headers["traceparent"].endswith("-01" if sent else "-00")


@pytest.mark.parametrize(("low_bits", "sampled"), [(0, True), ((1 << 62) - 1, True), (1 << 62, False)])
def test_the_ratio_is_drawn_by_the_low_half_of_the_trace_id_as_the_sdk_does(low_bits: int, sampled: bool) -> None:
    rule = Sampling(follows_parent=True, ratio=0.25)
    assert rule.is_sampled((7 << 64) | low_bits, parent=None) is sampled


@pytest.mark.parametrize(("ttft_s", "sent"), [(1.0, False), (3.0, True)])
async def test_an_unsampled_request_is_sent_if_its_first_token_was_late(ttft_s: float, sent: bool) -> None:
    async with traced_plane(Sampling(follows_parent=True, ratio=0.0, ttft_target_s=2.0)) as traced:

        async def script(exchange: Any) -> None:
            await traced.plane.clock.advance(ttft_s)
            await streams(event("a"), DONE)(exchange)

        async with Upstream(script) as worker:
            traced.plane.join("w0", worker.base_url)
            await traced.plane.post({"stream": True})
            await until(lambda: traced.plane.serving.metrics.inflight == 0)
            spans = await traced.spans()
        exemplars = traced.plane.exemplars("time_to_first_token_seconds")
    assert bool(spans) is sent
    assert exemplars == {span.trace_id: ttft_s for span in spans}
    assert not sent or one_tree(spans)[0].attributes["kvrouter.ttft_s"] == ttft_s
