"""Spans of requests at a worker: where they are in the trace, which are sent, and what the engine gets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from structlog.contextvars import get_contextvars

from kv_protocol.trace_context import parsed_trace_parent
from kv_runtime.http.answers import error_response
from kv_runtime.tracing.spans import Sampling, SpanData, TraceData
from tests.support.served import served
from worker_agent.api.in_flight import HandledRequest, InFlight, WorkerTracer

PATH = "/v1/completions"
TRACE, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
NONE = Sampling(follows_parent=True, ratio=0.0)
ALL = Sampling(follows_parent=True, ratio=1.0)


def caller(flags: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE:032x}-{CALLER:016x}-{flags}", "tracestate": "a=b"}


class Worker:
    """A worker that answers `status`, and keeps what it sent and what headers its engine would get."""

    def __init__(self, sampling: Sampling | None, status: int = 200) -> None:
        self.sent: list[TraceData] = []
        self.engine_headers: list[dict[str, str]] = []
        self.names_in_log: list[dict[str, str]] = []
        """What a log line that is written while a request is served has of it."""
        self._status = status
        tracer = (
            None
            if sampling is None
            else WorkerTracer(sampling, self.sent.append, worker_id="w0", role="decode", model="m")
        )
        self._in_flight = InFlight(8, tracer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.route("*", PATH, self._serve)])
        async with served(app) as url:
            yield url + PATH

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        return await self._in_flight.serving(self._answer)(http)

    async def _answer(self, http: web.Request) -> HandledRequest:
        assert await http.read() == b"a body"
        self.names_in_log.append(dict(get_contextvars()))
        self.engine_headers.append({name.lower(): value for name, value in http.headers.items()})
        if self._status == 200:
            return web.Response(), "ok"
        return error_response(self._status, "engine"), "failed" if self._status >= 500 else "refused"

    async def ask(self, headers: dict[str, str], method: str = "POST") -> dict[str, str]:
        """Return the headers that the engine would get."""
        async with (
            self.serving() as url,
            aiohttp.ClientSession() as session,
            session.request(method, url, data=b"a body", headers=headers) as response,
        ):
            assert response.status == self._status
        return self.engine_headers[-1]

    def span(self) -> SpanData:
        """Return the one span that was sent."""
        ((span,),) = [trace.spans for trace in self.sent]
        return span


async def test_the_span_is_below_the_router_s_and_above_the_engine_s() -> None:
    worker = Worker(NONE)
    headers = await worker.ask(caller("01") | {"x-request-id": "r1", "x-dp-rank": "3"})
    span = worker.span()
    assert (worker.sent[0].trace_id, worker.sent[0].parent_id) == (TRACE, CALLER)
    assert headers["traceparent"] == f"00-{TRACE:032x}-{span.span_id:016x}-01"
    assert headers["tracestate"] == "a=b"
    assert (span.name, span.kind, span.error) == ("text_completion m", "server", "")
    assert span.attributes.items() >= {
        ("kvrouter.worker", "w0"),
        ("kvrouter.role", "decode"),
        ("kvrouter.request_id", "r1"),
        ("kvrouter.dp_rank", "3"),
        ("kvrouter.outcome", "ok"),
        ("http.response.status_code", 200),
    }
    assert span.start_ns < span.end_ns


@pytest.mark.parametrize(
    ("sampling", "headers", "status", "sent"),
    [
        pytest.param(ALL, caller("00"), 200, 0, id="the router did not sample it"),
        pytest.param(ALL, caller("00"), 400, 0, id="the router did not sample it, and it was refused"),
        pytest.param(ALL, caller("00"), 502, 1, id="it failed"),
        pytest.param(ALL, {}, 200, 1, id="no router, all sampled"),
        pytest.param(NONE, {}, 200, 0, id="no router, none sampled"),
    ],
)
async def test_what_the_router_sampled_and_what_failed_is_sent(
    sampling: Sampling, headers: dict[str, str], status: int, sent: int
) -> None:
    worker = Worker(sampling, status)
    engine = parsed_trace_parent((await worker.ask(headers))["traceparent"].encode())
    assert engine is not None
    assert engine.span_id != CALLER
    assert len(worker.sent) == sent
    if sent and status == 502:
        assert (worker.span().error, worker.span().attributes["error.type"]) == ("failed", "failed")


@pytest.mark.parametrize("given", ["", "00-0-0-01", "é" * 9])
async def test_an_invalid_traceparent_begins_a_trace_without_its_tracestate(given: str) -> None:
    worker = Worker(ALL)
    headers = await worker.ask({"traceparent": given, "tracestate": "a=b"})
    assert "tracestate" not in headers
    assert worker.sent[0].parent_id == 0
    assert headers["traceparent"].startswith(f"00-{worker.sent[0].trace_id:032x}-")


async def test_what_is_no_generation_has_no_span() -> None:
    worker = Worker(ALL)
    assert "traceparent" not in await worker.ask({}, method="GET")
    assert worker.sent == []


@pytest.mark.parametrize("sampling", [None, NONE, ALL], ids=["tracing is off", "not sampled", "sampled"])
async def test_log_lines_of_a_request_have_its_ids_and_later_lines_do_not(sampling: Sampling | None) -> None:
    worker = Worker(sampling)
    await worker.ask(caller("01") | {"x-request-id": "r1"})
    await worker.ask({"traceparent": "nonsense"})
    named, unnamed = worker.names_in_log
    assert named == {"trace_id": f"{TRACE:032x}", "request_id": "r1"}
    assert unnamed.keys() == (set() if sampling is None else {"trace_id"})
    assert get_contextvars() == {}
