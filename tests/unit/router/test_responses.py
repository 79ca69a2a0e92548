"""`/v1/responses` through the data plane: where it goes, what is passed on, what is learnt of its stream."""

import asyncio
import base64
import json
from typing import Any

import pytest

from kv_protocol.hashing import unpack_tokens
from tests.unit.router.plane import CHAT, TEXT, Plane
from tests.unit.router.samples import MODEL
from tests.unit.router.upstream import STREAM_HEAD, Exchange, Upstream, answers, chunked, says, streams

RESPONSES = "/v1/responses"
STATES = ("chat", "completions", "responses")
USAGE = {
    "input_tokens": 9, "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 12,
}  # fmt: skip


def event(kind: str, number: int, **fields: Any) -> bytes:
    data = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return f"event: response.{kind}\ndata: {json.dumps(data)}\n\n".encode()


CREATED = event("created", 0, response={"id": "resp_1", "status": "in_progress"})
DELTAS = [event("output_text.delta", at, delta='word.delta"') for at in (1, 2, 3)]
COMPLETED = event("completed", 4, response={"id": "resp_1", "usage": USAGE})


def body(given: Any = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "input": given} | fields).encode()


async def test_the_prompt_is_that_of_the_chat_and_goes_where_it_is_held(plane: Plane) -> None:
    chat = [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hello " * 20}]
    async with Upstream(answers(200, b'{"usage":{}}')) as other, Upstream(answers(200, b'{"usage":{}}')) as holder:
        plane.join("w0", other.base_url, holds=9)
        plane.join("w1", other.base_url, api_endpoints=STATES)
        plane.join("w2", holder.base_url, holds=3, api_endpoints=STATES)
        answered = await plane.post(body("hello " * 20, instructions="be terse"), RESPONSES)
        (received,) = holder.received
    assert answered.headers["x-worker-instance-id"] == "w2"
    assert answered.headers["x-overlap-blocks"] == "3"
    assert received.path == RESPONSES
    ids = base64.b64decode(json.loads(received.body)["kv_prompt_ids"])
    assert unpack_tokens(ids) == unpack_tokens(TEXT.pack_chat(chat))
    decision = plane.routing.decisions.newest(1)[0].decision
    assert (decision.endpoint, decision.phase) == ("responses", "whole")
    assert {each.reason for each in decision.excluded} == {"endpoint responses: the worker states chat, completions"}


async def test_a_stream_comes_byte_for_byte_and_its_usage_is_read(plane: Plane) -> None:
    async with Upstream(streams(CREATED, *DELTAS, COMPLETED)) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        answered = await plane.post(body(stream=True), RESPONSES)
    assert answered.body == b"".join([CREATED, *DELTAS, COMPLETED])
    outcome = plane.outcome(answered.headers["x-decision-id"])
    assert (outcome.outcome, outcome.cached_tokens, outcome.output_tokens) == ("ok", 4, 3)


@pytest.mark.parametrize("pieces", [1, 7], ids=["whole chunks", "pieces"])
async def test_the_first_token_is_the_first_delta_and_the_others_give_the_time_between(
    plane: Plane, pieces: int
) -> None:
    steps: asyncio.Queue[None] = asyncio.Queue()

    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for each in (CREATED, *DELTAS, event("completed", 4), b""):
            for at in range(0, len(data := chunked(each)), len(data) // pieces + 1):
                await exchange.send(data[at : at + len(data) // pieces + 1])
            await steps.get()

    async with Upstream(script) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        reader, _ = await plane.dial(body(stream=True), RESPONSES)
        for mark in (b"response.created", *(f'"sequence_number": {at}'.encode() for at in (1, 2, 3)), b".completed"):
            await reader.readuntil(mark)
            await reader.readuntil(b"\n\n")
            await plane.clock.advance(1.0)
            steps.put_nowait(None)
        steps.put_nowait(None)
        await reader.readuntil(b"0\r\n\r\n")
        record = plane.routing.decisions.newest(1)[0]
    assert record.outcome is not None
    assert (record.outcome.ttft_s, record.outcome.itl_s) == (1.0, 2.0)


async def test_a_stream_that_is_cut_ends_with_the_error_event_of_a_response(plane: Plane) -> None:
    async with Upstream(says(STREAM_HEAD + chunked(CREATED) + chunked(DELTAS[0]))) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        answered = await plane.post(body(stream=True), RESPONSES)
    begun, _, error = answered.body.rpartition(b"event: error\n")
    assert begun == CREATED + DELTAS[0]
    found = json.loads(error.removeprefix(b"data: "))
    assert error.endswith(b"\n\n")
    message = found.pop("message")
    assert message.startswith("the worker failed in its answer: body:")
    assert found == {"type": "error", "sequence_number": 2, "code": "upstream_failed", "param": None}
    assert plane.outcomes() == {"failed": 1}


async def test_a_worker_that_fails_before_its_first_byte_is_passed_over(plane: Plane) -> None:
    async with Upstream(says(STREAM_HEAD)) as failing, Upstream(streams(CREATED, *DELTAS, COMPLETED)) as good:
        plane.join("w0", failing.base_url, holds=3, api_endpoints=STATES)
        plane.join("w1", good.base_url, api_endpoints=STATES)
        answered = await plane.post(body("hello " * 20, stream=True), RESPONSES)
        assert failing.received
    assert answered.headers["x-worker-instance-id"] == "w1"
    assert plane.outcomes() == {"ok": 1}


async def test_a_client_that_leaves_frees_its_worker(plane: Plane) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(CREATED))
        await exchange.until_gone()

    async with Upstream(script) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        reader, writer = await plane.dial(body(stream=True), RESPONSES)
        await reader.readuntil(b"response.created")
        writer.close()
        await worker.gone.wait()
    assert plane.outcomes() == {"cancelled": 1}


async def test_what_an_engine_has_stored_reaches_it(plane: Plane) -> None:
    async with Upstream(answers(200, b"{}")) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        answered = await plane.post(body(previous_response_id="resp_1"), RESPONSES)
    assert json.loads(worker.received[0].body)["previous_response_id"] == "resp_1"
    assert (answered.status, answered.headers["x-kv-unrendered"]) == (200, "previous_response_id")


async def test_without_a_worker_that_states_it_it_is_404(plane: Plane) -> None:
    plane.join("w0", "http://127.0.0.1:1")
    answered = await plane.post(body(), RESPONSES)
    assert (answered.status, answered.error["code"]) == (404, "endpoint_not_served")
    assert (await plane.post({"messages": [{"role": "user", "content": "x"}]}, CHAT)).status != 404
