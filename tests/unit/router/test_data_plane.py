"""The data plane over real sockets: what clients get, what workers are sent, and that nothing stays promised."""

import asyncio
import base64
import json
import socket
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_protocol.fleet import WorkerDraining
from kv_protocol.hashing import unpack_tokens
from kv_protocol.journal import FleetApplied, LogConnection
from router.fleet.registry import SILENT_S
from router.http.limits import HttpLimits
from tests.unit.router.plane import CHAT, COMPLETIONS, NOW_S, PROMPT, Plane, encoded, running_plane, until
from tests.unit.router.samples import MODEL, rank
from tests.unit.router.upstream import (
    DONE,
    STREAM_HEAD,
    WHOLE_HEAD,
    Exchange,
    Script,
    Upstream,
    answers,
    chunked,
    completion,
    event,
    says,
    says_and_waits,
    streams,
)

SHORT_S = 0.5
QUICKLY_CHECKED = HttpLimits(sweep_s=0.02, drain_s=0.0)
STREAMED: dict[str, Any] = {"stream": True}
GOOD = answers(200, completion())


def refusing_url() -> str:
    """Return an address at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


# ---------------------------------------------------------------- an answer


async def test_prompts_are_hashed_as_the_eldest_fit_worker_does_also_once_another_is_that(plane: Plane) -> None:
    async def block_size() -> int:
        assert (await plane.post()).status == 200
        return plane.routing.decisions.newest(1)[0].verdict.request.block_size

    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, block_size=32)
        found = [await block_size()]
        plane.join("w1", worker.base_url)
        await plane.clock.advance(SILENT_S - 0.5)
        plane.hear("w1")
        found.append(await block_size())
        await plane.clock.advance(0.5)  # w0 was silent for too long
        found.append(await block_size())
        plane.hear("w0")
        found.append(await block_size())
        plane.leave("w0")
        found.append(await block_size())
    assert found == [32, 32, 16, 32, 16]


async def test_an_answer_comes_as_the_worker_gave_it_with_headers_that_say_how(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, holds=3, dp_ranks=(4,))
        answered = await plane.post(x_request_id="mine")
    assert (answered.status, answered.body) == (200, completion())
    assert answered.headers["content-type"] == "application/json"
    assert answered.headers["x-request-id"] == "mine"
    assert answered.headers["x-worker-instance-id"] == "w0"
    assert answered.headers["x-dp-rank"] == "4"
    assert answered.headers["x-overlap-blocks"] == "3"
    assert plane.outcome(answered.headers["x-decision-id"]).cached_tokens == 48
    assert plane.outcomes() == {"ok": 1}


async def test_a_stream_comes_as_the_worker_gave_it(plane: Plane) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
    async with Upstream(streams(event("a"), event("b"), usage, DONE)) as worker:
        plane.join("w0", worker.base_url)
        answered = await plane.post(STREAMED)
    assert (answered.status, answered.body) == (200, event("a") + event("b") + usage + DONE)
    assert answered.headers["content-type"] == "text/event-stream"
    assert answered.headers["cache-control"] == "no-cache"
    assert plane.outcome(answered.headers["x-decision-id"]).cached_tokens == 32
    assert plane.outcomes() == {"ok": 1}


async def test_a_stream_is_passed_on_as_it_comes(plane: Plane) -> None:
    more = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.head(transfer_encoding="chunked")
        await exchange.chunk(event("first"))
        await more.wait()
        await exchange.chunk(DONE)
        await exchange.chunk(b"")

    async with Upstream(script) as worker:
        plane.join("w0", worker.base_url)
        reader, writer = await plane.dial(STREAMED)
        head = await reader.readuntil(event("first"))
        assert head.startswith(b"HTTP/1.1 200 ")
        assert plane.state.load_of(rank()).prefill_tokens_queued == 0, "the first byte ends the prefill"
        assert plane.state.load_of(rank()).active_requests == 1
        more.set()
        await reader.readuntil(DONE)
        writer.close()


async def test_a_worker_that_takes_token_ids_gets_them_and_its_rank(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, dp_ranks=(2,))
        body = encoded({"prompt": "häh", "temperature": 0.5})
        await plane.post(body, x_request_id="r", authorization="Bearer secret")
        (received,) = worker.received
    sent = json.loads(received.body)
    assert unpack_tokens(base64.b64decode(sent.pop("kv_prompt_ids"))) == list("häh".encode())
    assert sent == json.loads(body)
    assert received.body.endswith(body[1:])
    assert (received.path, received.headers["x-dp-rank"], received.headers["x-request-id"]) == (COMPLETIONS, "2", "r")
    assert received.headers["content-type"] == "application/json"


async def test_a_worker_that_takes_no_token_ids_gets_the_clients_bytes_unchanged(plane: Plane) -> None:
    body = b' {"model" : "m",\n"messages":[{"role":"user","content":"\\u00e4"}], "temperature":0.10 }\n'
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, accepts_token_ids=False)
        await plane.post(body, CHAT)
        (received,) = worker.received
    assert (received.path, received.body) == (CHAT, body)
    assert "x-dp-rank" not in received.headers


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
async def test_a_trace_header_is_passed_on_up_to_1024_bytes(plane: Plane, name: str) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        for size in (512, 1024, 1025):
            await plane.post(**{name: "s" * size, "x_session_id": "talk"})
    assert [len(each.headers.get(name, "")) for each in worker.received] == [512, 1024, 0]
    assert {each.headers["x-session-id"] for each in worker.received} == {"talk"}


async def test_parameters_without_effect_are_named(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        answered = await plane.post({"nvext": {"annotations": ["worker_id"]}})
        plain = await plane.post()
    assert answered.headers["x-ignored-parameters"] == "nvext.annotations"
    assert "x-ignored-parameters" not in plain.headers


# ---------------------------------------------------------------- before the first byte: another rank

FAILING: dict[str, tuple[Script, str, str]] = {
    "500": (answers(500, b'{"error":"boom"}'), "first_byte", "status 500"),
    "nothing": (says(b""), "first_byte", "the connection closed before the answer's end"),
    "a head and no stream": (says(STREAM_HEAD), "first_byte", "the connection closed before the answer's end"),
    "an empty stream": (streams(), "first_byte", "no bytes"),
    "elsewhere": (answers(307, b"", location="http://127.0.0.1:9/"), "first_byte", "status 307"),
    "half an answer": (says(WHOLE_HEAD + b'{"object"'), "body", "the connection closed before the answer's end"),
}


@pytest.mark.parametrize(("script", "phase", "reason"), FAILING.values(), ids=FAILING)
async def test_a_worker_that_fails_is_left_alone_and_another_answers(
    plane: Plane, script: Script, phase: str, reason: str
) -> None:
    with capture_logs() as logs:
        async with Upstream(script) as failing, Upstream(GOOD) as good:
            plane.join("w0", failing.base_url, holds=3)
            plane.join("w1", good.base_url)
            answered = await plane.post(x_request_id="r")
            assert (len(failing.received), len(good.received)) == (1, 1)
    assert (answered.status, answered.body) == (200, completion())
    assert answered.headers["x-worker-instance-id"] == "w1"
    assert answered.headers["x-overlap-blocks"] == "0"
    assert plane.metric("retries_total", phase=phase) == 1
    assert plane.metric("worker_failures_total", worker="w0", phase=phase) == 1
    assert plane.outcomes() == {"ok": 1}
    first, second = reversed(plane.routing.decisions.newest(9))
    assert first.outcome is not None
    assert (first.outcome.outcome, first.decision.chosen.worker_id) == ("failed", "w0")
    assert {each.reason for each in second.decision.excluded} == {"failed this request"}
    assert second.decision.decision_id == answered.headers["x-decision-id"] != first.decision.decision_id
    (line,) = logs
    assert (line["event"], line["log_level"], line["worker"], line["phase"]) == (
        "worker_failed",
        "warning",
        "w0",
        phase,
    )
    assert line["reason"].startswith(reason)


async def test_a_refused_connection_opens_the_breaker_and_another_answers(plane: Plane) -> None:
    async with Upstream(GOOD) as good:
        plane.join("w0", refusing_url(), holds=3)
        plane.join("w1", good.base_url)
        assert (await plane.post()).headers["x-worker-instance-id"] == "w1"
        assert plane.unfit("w0").startswith("breaker open: connect: ConnectionRefusedError")
        assert plane.metric("retries_total", phase="connect") == 1
        await plane.post()
        assert plane.metric("worker_failures_total", worker="w0", phase="connect") == 1, "it was not tried again"


@pytest.mark.parametrize(
    ("stream", "data"), [(False, b""), (True, b""), (True, STREAM_HEAD)], ids=["whole", "stream", "stream's head"]
)
async def test_a_worker_that_does_not_begin_in_time_fails(stream: bool, data: bytes) -> None:
    async with (
        running_plane(first_byte_s=SHORT_S, whole_s=SHORT_S, between_bytes_s=60) as plane,
        Upstream(says_and_waits(data)) as slow,
        Upstream(streams(event(), DONE)) as good,
    ):
        plane.join("w0", slow.base_url, holds=3)
        plane.join("w1", good.base_url)
        answered = await plane.post({"stream": stream})
        assert (answered.status, answered.body) == (200, event() + DONE)
        assert plane.metric("worker_failures_total", worker="w0", phase="first_byte") == 1
        await slow.gone.wait()


@pytest.mark.parametrize(
    ("stream", "limits"),
    [
        (True, {"first_byte_s": 60, "between_bytes_s": SHORT_S}),
        (False, {"first_byte_s": SHORT_S, "between_bytes_s": SHORT_S, "whole_s": 60}),
    ],
    ids=["to begin than to go on", "whole than a stream to begin"],
)
async def test_an_answer_may_take_longer(stream: bool, limits: dict[str, Any]) -> None:
    async def script(exchange: Exchange) -> None:
        if stream:
            await exchange.head(transfer_encoding="chunked")
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * SHORT_S):
                await exchange.until_gone()
        await (exchange.send(chunked(DONE) + chunked(b"")) if stream else exchange.answer(200, DONE))

    async with running_plane(**limits) as plane, Upstream(script) as worker:
        plane.join("w0", worker.base_url)
        assert (await plane.post({"stream": stream})).body == DONE


@pytest.mark.parametrize(("limit", "attempts"), [(0, 1), (1, 2), (2, 3)])
async def test_no_more_than_the_limit_is_tried_and_the_last_answer_is_passed_on(limit: int, attempts: int) -> None:
    async with running_plane(retry_limit=limit) as plane, Upstream(answers(500, b"out of memory")) as failing:
        for number in range(5):
            plane.join(f"w{number}", failing.base_url)
        answered = await plane.post()
        assert len(failing.received) == attempts
        last = plane.routing.decisions.newest(1)[0].decision.chosen.worker_id
        assert (answered.status, answered.body) == (500, b"out of memory")
        assert answered.headers["x-kv-failure"] == f"{last}/0: status 500; no other worker is left"
        assert plane.metric("retries_total", phase="first_byte") == limit
        assert plane.outcomes() == {"failed": 1}


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_when_no_rank_is_left_to_try_the_failed_answer_is_passed_on(plane: Plane, status: int) -> None:
    told = answers(status, b"no", "text/plain", retry_after="17", x_kv_failure="of another router")
    named = "x-prefill-instance-id: w1"  # reads like a header
    async with Upstream(told) as failing:
        plane.join("w0", failing.base_url)
        answered = await plane.post(x_request_id=named)
    assert (answered.status, answered.body, answered.headers["Retry-After"]) == (status, b"no", "17")
    assert (answered.headers["x-request-id"], "x-prefill-instance-id" in answered.headers) == (named, False)
    assert answered.headers["x-kv-failure"] == f"w0/0: status {status}; no other worker is left"
    assert plane.metric("retries_total", phase="first_byte") == 0, "there was no other rank to try"
    assert plane.outcomes() == {"failed": 1}


async def test_a_worker_that_cuts_answers_off_again_and_again_is_left_alone_for_a_while(plane: Plane) -> None:
    async with Upstream(says(WHOLE_HEAD + b"{")) as worker:
        plane.join("w0", worker.base_url)
        assert [(await plane.post()).status for _ in range(4)] == [502, 502, 502, 503]
        assert plane.unfit("w0").startswith("breaker open: body")
        assert len(worker.received) == 3
        worker.script = GOOD
        await plane.clock.advance(10.0)
        plane.hear("w0")
        assert (await plane.post()).status == 200
        assert plane.unfit("w0") == ""


@pytest.mark.parametrize("data", [b"", STREAM_HEAD], ids=["nothing", "head"])
@pytest.mark.parametrize("how", ["silent", "left", "replaced"])
async def test_a_request_without_a_byte_leaves_a_worker_that_is_lost(how: str, data: bytes) -> None:
    async with (
        running_plane(limits=QUICKLY_CHECKED) as plane,
        Upstream(says_and_waits(data)) as frozen,
        Upstream(streams(event(), DONE)) as good,
    ):
        plane.join("w0", frozen.base_url, holds=3, dp_ranks=(0, 1))
        plane.join("w1", good.base_url)
        asked = asyncio.ensure_future(plane.post({"stream": bool(data)}))
        await until(lambda: bool(frozen.received))
        if how == "silent":
            await plane.fall_silent("w0")
        elif how == "left":
            plane.leave("w0")
        else:
            plane.join("w0", refusing_url(), instance="another", drained=True)
        answered = await asked
        assert (answered.body, answered.headers["x-worker-instance-id"]) == (event() + DONE, "w1")
        assert plane.metric("retries_total", phase="first_byte") == 1
        failures = plane.metric("worker_failures_total", worker="w0", phase="first_byte")
        assert failures == (how == "silent"), "a worker that left has not failed"
        await frozen.gone.wait()
        assert len(frozen.received) == 1, "its other rank was not asked"


@pytest.mark.parametrize(
    "why", ["all are silent", "the log is away", "no other is fit", "only its own rank is", "no retry", "pinned"]
)
async def test_a_request_stays_at_a_silent_worker_when_it_cannot_be_served_elsewhere(why: str) -> None:
    heals = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await heals.wait()
        await exchange.answer(200, completion())

    retries = 0 if why == "no retry" else 2
    async with running_plane(limits=QUICKLY_CHECKED, retry_limit=retries) as plane, Upstream(script) as worker:
        plane.join("w0", worker.base_url, holds=3)
        plane.join("w1", refusing_url())
        asked = asyncio.ensure_future(plane.post({"nvext": {"backend_instance_id": "w0"}} if why == "pinned" else None))
        await until(lambda: bool(worker.received))
        if why in ("no other is fit", "only its own rank is"):
            draining = WorkerDraining(worker_id="w1", instance="w1-1")
            plane.state.apply(FleetApplied(now_s=NOW_S, event=draining))
        if why == "the log is away":
            plane.state.apply(LogConnection(now_s=NOW_S, heard=False))
        if why == "only its own rank is":
            plane.join("w0", worker.base_url, instance="another")
        silent = {"all are silent": ("w0", "w1"), "only its own rank is": ()}
        await plane.fall_silent(*silent.get(why, ("w0",)))
        await plane.checked()
        heals.set()
        answered = await asked
        assert (answered.status, answered.headers["x-worker-instance-id"]) == (200, "w0")


# ---------------------------------------------------------------- after the first byte: no retry


async def test_a_stream_that_is_cut_ends_with_an_error_event_and_done(plane: Plane) -> None:
    async with Upstream(says(STREAM_HEAD + chunked(event("first")))) as worker, Upstream(GOOD) as other:
        plane.join("w0", worker.base_url, holds=3)
        plane.join("w1", other.base_url)
        answered = await plane.post(STREAMED, x_request_id="r")
        assert other.received == []
    assert answered.status == 200
    assert b'"code":"upstream_failed"' in answered.body
    assert plane.outcome("r").outcome == "failed"
    assert plane.outcomes() == {"failed": 1}
    assert plane.metric("worker_failures_total", worker="w0", phase="body") == 1
    assert plane.metric("retries_total", phase="body") == 0


@pytest.mark.parametrize("migration_limit", [0, 2])
@pytest.mark.parametrize("is_in_one_read", [True, False])
async def test_a_stream_that_is_cut_behind_its_done_is_complete(migration_limit: int, *, is_in_one_read: bool) -> None:
    async def done_but_not_ended(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(event("all")) + chunked(DONE) * is_in_one_read)
        if not is_in_one_read:
            await passed_on.wait()
            await exchange.send(chunked(DONE))
        await exchange.cut()

    passed_on = asyncio.Event()
    async with running_plane(migration_limit=migration_limit) as plane, Upstream(done_but_not_ended) as worker:
        plane.join("w0", worker.base_url)
        reader, _ = await plane.dial(STREAMED, headers=b"x-request-id: r\r\nconnection: close\r\n")
        answered = await reader.readuntil(event("all").strip())
        passed_on.set()
        answered += await reader.read()
        assert answered.endswith(b"0\r\n\r\n")
        assert (answered.count(b"[DONE]"), b"error" in answered) == (1, False)
        assert plane.outcome("r").outcome == "ok"


# ---------------------------------------------------------------- back-pressure


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("retry_after", ["7", "soon"])
async def test_a_busy_worker_is_spared_and_is_no_failed_one(plane: Plane, status: int, retry_after: str) -> None:
    async with Upstream(answers(status, b"busy", retry_after=retry_after)) as busy, Upstream(GOOD) as good:
        plane.join("w0", busy.base_url, holds=3)
        plane.join("w1", good.base_url)
        answered = await plane.post()
    assert (answered.status, answered.headers["x-worker-instance-id"]) == (200, "w1")
    assert plane.unfit("w0").startswith("busy")
    assert plane.metric("worker_failures_total", worker="w0", phase="first_byte") == 0
    assert plane.outcomes() == {"ok": 1}


@pytest.mark.parametrize("status", [401, 302])
async def test_an_answer_that_is_meant_for_the_router_is_never_passed_on(status: int) -> None:
    async with running_plane(retry_limit=0) as plane, Upstream(answers(status, b"go away")) as worker:
        plane.join("w0", worker.base_url)
        answered = await plane.post()
    assert (answered.status, answered.error["code"]) == (502, "upstream_failed")


# ---------------------------------------------------------------- clients' faults


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_a_refusal_is_passed_on_and_opens_no_breaker(plane: Plane, status: int, content_type: str) -> None:
    body = b'{"error":{"message":"no","type":"t","param":null,"code":null}}'
    async with Upstream(answers(status, body, content_type)) as worker, Upstream(GOOD) as other:
        plane.join("w0", worker.base_url, holds=3)
        plane.join("w1", other.base_url)
        answered = await plane.post(STREAMED, x_request_id="r")
        assert other.received == []
    assert (answered.status, answered.body, answered.headers["content-type"]) == (status, body, content_type)
    assert answered.headers["x-worker-instance-id"] == "w0"
    assert plane.unfit("w0") == ""
    assert plane.outcome("r").outcome == "refused"
    assert plane.outcomes() == {"refused": 1}
    assert plane.metric("worker_failures_total", worker="w0", phase="first_byte") == 0


async def test_errors_show_80_characters_of_a_path_a_key_and_a_header(plane: Plane) -> None:
    for at in range(10):
        plane.join(f"w{at}", "http://127.0.0.1:1")
    unknown = await plane.get("/" + "p" * 20_000)
    assert unknown.error["message"] == f"GET /{'p' * 79}...: Not Found"
    key = await plane.post({"model": "k" * 20_000})
    assert key.error["message"].startswith(f'model: found "{"k" * 79}..., allowed')
    pinned = await plane.post(x_worker_instance_id="w" * 20_000)
    assert [(each.status, len(each.body) < 1024) for each in (key, pinned)] == [(404, True), (400, True)]


@pytest.mark.parametrize(
    ("body", "headers", "status", "param"),
    [
        (b"{", {}, 400, "body"),
        ({"nvext": {"token_data": []}}, {}, 400, "nvext.token_data"),
        ({"model": "gpt-9"}, {}, 404, "model"),
        ({"kv_prompt_ids": "AAAA"}, {}, 400, "kv_prompt_ids"),
        ({}, {"x_dp_rank": "first"}, 400, "x-dp-rank"),
        ({}, {"x_dp_rank": "-1"}, 400, "x-dp-rank"),
        ({}, {"x_dp_rank": "9" * 5000}, 400, "x-dp-rank"),
        ({}, {"x_dp_rank": "²"}, 400, "x-dp-rank"),
        (b'{"model":7,', {}, 400, "model"),
        (b'{"model":7,"temperature":1e999}', {}, 400, "model"),
        (b'{"model":"m","nvext":' + b'{"a":' * 60_000, {}, 400, "body"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_bad_request_is_named_and_reaches_no_worker(
    plane: Plane, body: Any, headers: dict[str, str], status: int, param: str
) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        answered = await plane.post(body, **headers)
        assert worker.received == []
    assert (answered.status, answered.error["param"]) == (status, param)
    assert answered.error["type"] == "invalid_request_error"
    assert plane.routing.decisions.newest(1) == []
    assert sum(plane.metric("requests_total", model=m, mode="kv", outcome="refused") for m in (MODEL, "unknown")) == 1


# ---------------------------------------------------------------- no worker, or too many requests


async def test_while_no_worker_is_registered_requests_are_to_come_again_and_then_served_models_are_named(
    plane: Plane,
) -> None:
    answered = await plane.post()
    assert (answered.status, answered.error["code"]) == (503, "no_worker")
    assert answered.error["message"] == "no worker is registered yet"
    assert answered.headers["retry-after"] == "1"
    plane.join("w0", refusing_url(), served_names=("m", "alias"))
    answered = await plane.post({"model": "gpt-9"})
    assert (answered.status, answered.error["code"]) == (404, "model_not_found")
    assert answered.error["message"] == 'model: found "gpt-9", allowed m, alias'


async def test_beyond_the_bound_requests_are_refused_at_once_and_served_again_later() -> None:
    more = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await more.wait()
        await exchange.answer(200, completion())

    async with running_plane(queue={"inflight_requests_max": 2}) as plane, Upstream(script) as worker:
        plane.join("w0", worker.base_url)
        running = [asyncio.ensure_future(plane.post()) for _ in range(2)]
        await until(lambda: len(worker.received) == 2)
        assert plane.metric("inflight_requests") == 2
        for refused in [await plane.post(), await plane.post(b"{")]:
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert refused.error["message"].startswith("queue.inflight_requests_max: 2 requests")
            assert refused.headers["retry-after"] == "1"
        assert (await plane.get("/health")).status == 200
        assert plane.metric("rejected_total", reason="inflight_requests_max") == 2
        more.set()
        assert [(await each).status for each in running] == [200, 200]
        assert (await plane.post()).status == 200
        assert len(worker.received) == 3


async def test_every_request_that_leaves_the_queue_counts_its_wait() -> None:
    def counted() -> tuple[float, float]:
        return plane.metric("queue_wait_seconds_count"), plane.metric("queue_wait_seconds_sum")

    async with (
        running_plane(queue={"threshold": 0.0}) as plane,
        Upstream(says_and_waits(b"")) as busy,
        Upstream(GOOD) as free,
    ):
        plane.join("w0", busy.base_url)
        _, running = await plane.dial()
        await until(lambda: bool(busy.received))
        _, leaves = await plane.dial()
        await until(lambda: len(plane.admission.queue) == 1)
        await plane.clock.advance(2.0)
        leaves.transport.abort()
        await until(lambda: len(plane.admission.queue) == 0)
        assert counted() == (1, 2.0), "its client left"
        waits = asyncio.ensure_future(plane.post())
        await until(lambda: len(plane.admission.queue) == 1)
        await plane.clock.advance(1.0)
        plane.join("w1", free.base_url)
        assert [(await each).status for each in (asyncio.ensure_future(plane.post()), waits)] == [200, 200]
        assert counted() == (3, 3.0), "the last one was admitted as it came"
        running.close()


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("abort", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (b"", b""),
        (STREAM_HEAD, b""),
        (STREAM_HEAD + chunked(event("first")), event("first")),
        (WHOLE_HEAD, b""),
        (WHOLE_HEAD + b'{"object"', b""),
    ],
    ids=["before the head", "after a stream's head", "in a stream", "after an answer's head", "in an answer"],
)
async def test_a_client_that_leaves_frees_everything_at_once(
    plane: Plane, sent: bytes, seen: bytes, abort: bool
) -> None:
    with capture_logs() as logs:
        async with Upstream(says_and_waits(sent)) as worker, Upstream(GOOD) as other:
            plane.join("w0", worker.base_url, holds=3)
            plane.join("w1", other.base_url)
            reader, writer = await plane.dial(headers=b"x-request-id: r\r\n")
            await until(lambda: bool(worker.received))
            if seen:
                await reader.readuntil(seen)
            writer.transport.abort() if abort else writer.close()
            await worker.gone.wait()
            await until(lambda: plane.serving.metrics.inflight == 0)
            assert other.received == [], "no other worker repeats the request"
    plane.assert_nothing_is_promised()
    assert plane.outcome("r").outcome == "cancelled"
    assert plane.outcomes() == {"cancelled": 1}
    assert plane.unfit("w0") == ""
    assert logs == []


async def test_a_client_whose_leaving_is_noticed_only_in_writing_is_cancelled_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(event("first")))
        await left.wait()
        try:
            while True:
                await exchange.send(chunked(event("more")))
                await asyncio.sleep(0)
        finally:
            exchange.upstream.gone.set()

    left = asyncio.Event()
    async with running_plane() as plane, Upstream(script) as worker:
        plane.join("w0", worker.base_url)
        reader, writer = await plane.dial(STREAMED, headers=b"x-request-id: r\r\n")
        await reader.readuntil(event("first"))
        writer.transport.abort()
        left.set()
        await until(lambda: plane.serving.metrics.inflight == 0)
        await worker.gone.wait()
        assert plane.outcome("r").outcome == "cancelled"
        assert plane.outcomes() == {"cancelled": 1}
        assert plane.unfit("w0") == ""
    assert caplog.records == []


# ---------------------------------------------------------------- names of requests


@pytest.mark.parametrize(
    "given",
    [
        "r-1",
        "a b",
        "x" * 128,
        "ünï",
        "id:with/odd?characters=1&2",
        "a%0d%0aset-cookie: b",
        "a\u560d\u560aset-cookie: b",
    ],
)
async def test_a_clients_request_id_is_used(plane: Plane, given: str) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        answered = await plane.post(x_request_id=given)
        assert worker.received[0].headers["x-request-id"] == given
    assert answered.headers["x-request-id"] == given
    assert plane.outcome(given).outcome == "ok"


# ---------------------------------------------------------------- the other endpoints


async def test_ready_says_why_not(plane: Plane) -> None:
    async def reasons() -> tuple[int, list[str]]:
        answered = await plane.get("/ready")
        told = json.loads(answered.body)
        assert told["ready"] == (answered.status == 200) == (not told["reasons"])
        return answered.status, told["reasons"] or told["notes"]

    assert await reasons() == (503, ["no worker is fit"])
    plane.join("w0", "http://127.0.0.1:1", dp_ranks=(0, 1))
    assert await reasons() == (200, [])
    plane.index.stale[rank("w0/1")] = "resyncing"
    assert await reasons() == (200, ["w0/1: resyncing"])
    plane.state.apply(FleetApplied(now_s=NOW_S, event=WorkerDraining(worker_id="w0", instance="w0-1")))
    assert await reasons() == (503, ["no worker is fit"])
    plane.leave("w0")
    assert await reasons() == (503, ["no worker is fit"])
    plane.index.progress = "index at 40 of 100"
    assert await reasons() == (503, ["index at 40 of 100", "no worker is fit"])


async def test_a_log_that_is_away_is_told_by_ready_and_requests_are_answered(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, holds=3)
        plane.index.stale[rank("w0/0")] = "log_away"
        plane.state.apply(LogConnection(now_s=NOW_S, heard=False))
        ready = await plane.get("/ready")
        answered = await plane.post()
    note = "the event log is away: requests are routed from memory"
    assert (ready.status, json.loads(ready.body)) == (200, {"ready": True, "reasons": [], "notes": [note]})
    assert (answered.status, answered.headers["x-overlap-blocks"]) == (200, "3")
    (record,) = plane.routing.decisions.newest(9)
    assert (record.decision.chosen.trust, record.decision.chosen.trust_reason) == ("DEGRADED", "event log away")


async def test_the_header_says_what_the_index_says_and_not_what_is_on_its_way(plane: Plane) -> None:
    async with Upstream(says_and_waits(STREAM_HEAD + chunked(event("first")))) as worker:
        plane.join("w0", worker.base_url, holds=1)
        reader, writer = await plane.dial(STREAMED)
        await reader.readuntil(event("first"))
        worker.script = GOOD
        answered = await plane.post()
        writer.close()
    (second, _) = plane.routing.decisions.newest(9)
    assert second.decision.chosen.predicted_blocks == 3
    assert answered.headers["x-overlap-blocks"] == "1"
    assert plane.metric("predicted_on_route_blocks_total") == 2
    assert plane.metric("predicted_cached_tokens_total", worker="w0") == 16


async def test_models_are_those_that_workers_serve_and_each_is_found_by_its_name(plane: Plane) -> None:
    assert (await plane.get("/v1/models/m")).status == 503
    assert json.loads((await plane.get("/v1/models")).body) == {"object": "list", "data": []}
    plane.join("w0", "http://127.0.0.1:1", served_names=("org/m", "m"), loras=("poet",))
    listed = json.loads((await plane.get("/v1/models")).body)["data"]
    assert [each["id"] for each in listed] == ["org/m", "m", "poet"]
    for name in ("m", "org/m", "org%2Fm", "poet"):
        found = await plane.get(f"/v1/models/{name}")
        assert (found.status, json.loads(found.body)["id"]) == (200, name.replace("%2F", "/"))
    unknown = await plane.get("/v1/models/other")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": PROMPT},
        {"prompt": "messages"},
        {"prompt": "x", "stop": ["messages"]},
        {"prompt": None, "messages": [{"role": "user", "content": "hello"}]},
    ],
)
async def test_a_route_is_a_decision_of_which_nothing_comes(plane: Plane, body: dict[str, Any]) -> None:
    request = {key: value for key, value in ({"model": MODEL} | body).items() if value is not None}
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, holds=3)
        answered = await plane.post(json.dumps(request).encode(), "/v1/route")
        assert worker.received == []
    told = json.loads(answered.body)
    assert answered.status == 200, told
    assert told["decision"]["candidates"][0]["worker_id"] == "w0"
    assert told["explanation"].startswith("Request id-2, ")
    assert plane.routing.decisions.newest(1) == []


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'{"messages":[]}'])
async def test_a_route_of_nonsense_is_refused(plane: Plane, body: bytes) -> None:
    plane.join("w0", "http://127.0.0.1:1")
    assert (await plane.post(body, "/v1/route")).status == 400


async def test_a_limit_of_the_router_itself_is_not_held_against_the_worker() -> None:
    limits = HttpLimits(worker_connections_max=1, drain_s=0.0)
    async with running_plane(limits=limits) as plane, Upstream(says_and_waits(STREAM_HEAD)) as worker:
        plane.join("w0", worker.base_url)
        _, writer = await plane.dial(STREAMED)
        await until(lambda: bool(worker.received))
        refused = await plane.post(x_request_id="r")
        assert (refused.status, refused.error["code"], refused.headers["x-request-id"]) == (503, "overloaded", "r")
        assert refused.error["message"] == "1 connections to workers are open; try again"
        assert plane.unfit("w0") == ""
        assert plane.metric("worker_failures_total", worker="w0", phase="connect") == 0
        writer.close()
        await worker.gone.wait()
