"""The request log over real sockets: which requests have a line, what stands in it, and what never does."""

import json
from collections.abc import Iterable, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.unit.router.plane import CHAT, Plane, running_plane, until
from tests.unit.router.samples import MODEL
from tests.unit.router.test_disaggregated import BODY, fleet
from tests.unit.router.upstream import Upstream, answers, completion, says_and_waits, streams

EVENTS = ("request_ended", "request_refused", "request_cut_off")
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":32}}}'
)
GOOD = answers(200, USAGE)
SECRET = "hunter2-hunter2"


def of(logged: Iterable[MutableMapping[str, Any]], *events: str) -> list[dict[str, Any]]:
    return [dict(line) for line in logged if line["event"] in (events or EVENTS)]


async def lines(plane: Plane, **body: Any) -> list[dict[str, Any]]:
    """Return what the log says of one request."""
    with capture_logs() as logged:
        await plane.post(body, x_request_id="r1")
        await until(lambda: plane.serving.metrics.inflight == 0)
    return of(logged)


async def test_by_default_answered_requests_have_no_line() -> None:
    async with running_plane() as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        assert await lines(plane) == []


async def test_a_line_says_where_a_request_went_and_what_came_of_it() -> None:
    async with running_plane(request_log_ratio=1.0) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, holds=3)
        (line,) = await lines(plane)
        decision = plane.routing.decisions.newest(1)[0].decision
        assert line.pop("e2e_ms") > 0
        assert line.pop("body_bytes") > 0
        assert json.loads(json.dumps(line)) == {
            "event": "request_ended",
            "log_level": "info",
            "outcome": "ok",
            "request_id": "r1",
            "decision_id": decision.decision_id,
            "model": MODEL,
            "isl_tokens": 64,
            "status": 200,
            "worker": "w0",
            "rank": 0,
            "trust": "EXACT",
            "overlap_tokens": 48,
            "cached_tokens": 32,
            "output_tokens": 5,
            "mode": "kv",
            "phases": ["whole w0/0"],
            "retries": 0,
            "migrations": 0,
        }


async def test_a_line_names_the_workers_of_both_phases() -> None:
    async with fleet("prefill", "decode", request_log_ratio=1.0) as running:
        with capture_logs() as logged:
            await running.ask()
            await until(lambda: running.plane.serving.metrics.inflight == 0)
        (line,) = of(logged)
        assert (line["phases"], line["worker"], line["retries"]) == (["prefill p0/0", "decode d1/0"], "d1", 0)


async def test_a_line_counts_retries() -> None:
    async with running_plane(request_log_ratio=1.0) as plane, Upstream(answers(500)) as broken, Upstream(GOOD) as good:
        plane.join("w0", broken.base_url, holds=3)
        plane.join("w1", good.base_url)
        (line,) = await lines(plane)
        assert (line["phases"], line["retries"], line["worker"]) == (["whole w0/0", "whole w1/0"], 1, "w1")


async def test_a_request_is_drawn_by_its_id_and_equally_by_every_router() -> None:
    ids = [f"request-{number}" for number in range(200)]

    async def drawn() -> set[str]:
        async with running_plane(request_log_ratio=0.25) as plane, Upstream(GOOD) as worker:
            plane.join("w0", worker.base_url)
            with capture_logs() as logged:
                for each in ids:
                    await plane.post(x_request_id=each)
            return {line["request_id"] for line in of(logged, "request_ended")}

    first = await drawn()
    assert 25 <= len(first) <= 75
    assert await drawn() == first


async def test_errors_of_the_router_s_own_are_logged_once_a_reason_and_period_and_then_counted() -> None:
    async with running_plane() as plane:
        with capture_logs() as logged:
            for _ in range(5):
                assert (await plane.post({"model": "other"})).status == 503
                assert (await plane.post({"nvext": "many"})).status == 400
            await plane.clock.advance(10.0)
            await plane.post()
        refused = [(line["status"], line["reason"], line.get("param"), line.get("suppressed")) for line in of(logged)]
        assert refused == [
            (503, "no_worker", None, None),
            (400, "invalid_request_error", "nvext", None),
            (503, "no_worker", None, 4),
        ]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("GET", "/nowhere"), ("POST", "/v1/route")])
async def test_refusals_of_every_endpoint_are_logged(method: str, path: str) -> None:
    async with running_plane() as plane:
        with capture_logs() as logged:
            answered = await (plane.post(b"{", path) if method == "POST" else plane.get(path))
        (line,) = of(logged)
        assert (line["event"], line["log_level"], line["status"]) == ("request_refused", "warning", answered.status)


async def test_a_refused_request_that_was_drawn_is_logged_each_time() -> None:
    async with running_plane(request_log_ratio=1.0) as plane:
        with capture_logs() as logged:
            for _ in range(3):
                await plane.post()
        assert [(line["event"], line.get("suppressed")) for line in of(logged)] == [("request_refused", None)] * 3


async def test_an_answer_that_a_worker_does_not_finish_is_logged_also_when_not_drawn() -> None:
    async with running_plane(between_bytes_s=0.1, migration_limit=0) as plane:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        async with Upstream(says_and_waits(head + b"a\r\ndata: {}\n\n\r\n")) as worker:
            plane.join("w0", worker.base_url)
            (line,) = await lines(plane, stream=True)
        assert (line["event"], line["outcome"], line["worker"], line["reason"]) == (
            "request_cut_off", "failed", "w0", "body",
        )  # fmt: skip


async def test_a_client_that_leaves_is_an_outcome() -> None:
    async with running_plane(request_log_ratio=1.0) as plane, Upstream(says_and_waits(b"")) as worker:
        plane.join("w0", worker.base_url)
        with capture_logs() as logged:
            _, writer = await plane.dial()
            await until(lambda: plane.serving.metrics.inflight == 1 and bool(worker.received))
            writer.close()
            await until(lambda: plane.serving.metrics.inflight == 0)
        (line,) = of(logged)
        assert (line["event"], line["outcome"], line["worker"]) == ("request_ended", "cancelled", "w0")


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_no_secret_and_no_text_of_a_client_stands_in_the_log(ratio: float) -> None:
    headers = {"authorization": f"Bearer {SECRET}", "x_api_key": SECRET, "cookie": SECRET, "x_session_id": SECRET}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "user": SECRET}
    bodies: list[Any] = [
        json.dumps(chat).encode(),
        json.dumps(chat | {"messages": [{"role": SECRET, "content": {SECRET: SECRET}}]}).encode(),
        {"prompt": SECRET, "cache_salt": SECRET},
        {"prompt": SECRET, "max_tokens": SECRET},
        {"prompt": SECRET, "model": SECRET},
        {"prompt": SECRET, SECRET: SECRET},
        {"prompt": {SECRET: SECRET}},
        {"prompt": SECRET, "nvext": {"dp_rank": SECRET}},
        {"prompt": SECRET, "stop": SECRET, "tools": [{SECRET: SECRET}]},
    ]
    queue = {"fair_share_by": "api_key"}
    said = completion().replace(b"}", b', "said": "%b"}' % SECRET.encode(), 1)
    for script in (answers(200, said), answers(500, said), answers(400, said)):
        async with running_plane(request_log_ratio=ratio, queue=queue) as plane, Upstream(script) as worker:
            plane.join("w0", worker.base_url)
            with capture_logs() as logged:
                for body in bodies:
                    for path in (CHAT, "/v1/completions", "/v1/route", f"/{SECRET}"):
                        await plane.post(body, path, **headers)
                await plane.post(x_preferred_taints=SECRET, **headers)
                await plane.post(x_worker_instance_id=SECRET, **headers)
        assert of(logged, "request_refused")
        assert SECRET not in json.dumps(logged, default=repr)
        assert {each.path for each in worker.received} == {CHAT, "/v1/completions"}


async def test_a_tenant_stands_as_the_metrics_name_it() -> None:
    queue = {"fair_share_by": "x-team"}
    async with running_plane(request_log_ratio=1.0, queue=queue) as plane, Upstream(streams()) as worker:
        plane.join("w0", worker.base_url)
        with capture_logs() as logged:
            await plane.post(x_team="research")
        assert of(logged)[0]["tenant"] == "research"


async def test_a_line_counts_migrations() -> None:
    async with fleet("aggregated", "aggregated", request_log_ratio=1.0) as running:
        running.workers["a0"].cut_after = 2
        running.workers["a1"].cut_after = 2
        with capture_logs() as logged:
            await running.ask()
            await until(lambda: running.plane.serving.metrics.inflight == 0)
        (line,) = of(logged)
        assert (line["migrations"], line["retries"], len(line["phases"]), line["outcome"]) == (2, 0, 3, "ok")


async def test_a_stream_that_no_other_worker_continues_is_no_retry() -> None:
    async with fleet("aggregated", request_log_ratio=1.0) as running:
        running.workers["a0"].cut_after = 2
        with capture_logs() as logged:
            await running.plane.post(BODY)
            await until(lambda: running.plane.serving.metrics.inflight == 0)
        (line,) = of(logged)
        assert (line["retries"], line["phases"]) == (0, ["whole a0/0"])
