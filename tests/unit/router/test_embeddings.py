"""`/v1/embeddings` and the endpoints that workers state: which are asked, what is refused, what the decision says."""

import json
from typing import Any

import pytest

from router.decision.policy import Policy
from router.decision.report import explanation
from tests.unit.router.plane import Plane, running_plane
from tests.unit.router.samples import MODEL
from tests.unit.router.upstream import Upstream, answers, completion, says, says_and_waits

EMBEDDINGS = "/v1/embeddings"
ANSWER = json.dumps({"object": "list", "data": [], "usage": {"prompt_tokens": 12, "total_tokens": 12}}).encode()
GOOD = answers(200, ANSWER)
STATES = ("chat", "completions", "embeddings")
CUT_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "input": "hello"} | fields).encode()


@pytest.mark.parametrize("given", ["hello", ["a", "b"], [1, 2, 3], [[1, 2], [3]]], ids=repr)
async def test_the_worker_that_states_embeddings_gets_the_clients_bytes(plane: Plane, given: Any) -> None:
    sent = body(input=given, encoding_format="base64", dimensions=8, user="u")
    async with Upstream(GOOD) as other, Upstream(GOOD) as worker:
        plane.join("w0", other.base_url, holds=3)
        plane.join("w1", worker.base_url, api_endpoints=STATES)
        answered = await plane.post(sent, EMBEDDINGS)
        (received,) = worker.received
        assert not other.received
    assert (answered.status, answered.body) == (200, ANSWER)
    assert (received.path, received.body) == (EMBEDDINGS, sent)
    assert plane.outcomes() == {"ok": 1}
    assert plane.metric("input_tokens_sum") == 12


async def test_embeddings_go_by_load_alone_and_the_decision_says_so(plane: Plane) -> None:
    async with Upstream(says_and_waits(b"")) as busy, Upstream(GOOD) as idle:
        plane.join("w0", busy.base_url, holds=3, api_endpoints=STATES)
        await plane.dial()
        while not busy.received:
            await plane.get("/health")
        plane.join("w1", idle.base_url, api_endpoints=STATES)
        answered = await plane.post(body(), EMBEDDINGS, x_session_id="s")
        assert answered.headers["x-worker-instance-id"] == "w1"
    record = plane.routing.decisions.find(answered.headers["x-decision-id"])
    assert record is not None
    decision = record.decision
    assert (decision.endpoint, decision.policy, decision.phase) == ("embeddings", "least-loaded", "whole")
    assert (decision.isl_tokens, decision.session_rank) == (0, "")
    assert "An embedding reuses no KV prefix" in explanation(decision)
    outcome = plane.outcome(decision.decision_id)
    assert (outcome.ttft_s, outcome.itl_s, outcome.output_tokens) == (None, None, None)


@pytest.mark.parametrize("stated", [("chat", "completions"), ("completions",), (), ("a later one",)], ids=repr)
async def test_an_endpoint_that_no_worker_states_is_404_and_says_what_they_state(
    plane: Plane, stated: tuple[str, ...]
) -> None:
    plane.join("w0", "http://127.0.0.1:1", api_endpoints=stated)
    answered = await plane.post(body(), EMBEDDINGS)
    assert (answered.status, answered.error["code"]) == (404, "endpoint_not_served")
    words = ", ".join(sorted(stated)) or "none"
    assert answered.error["message"] == f'{EMBEDDINGS}: no worker of "{MODEL}" serves it; they state {words}'
    assert plane.outcomes() == {"refused": 1}


async def test_a_chat_does_not_go_to_a_worker_that_states_embeddings_alone(plane: Plane) -> None:
    async with Upstream(answers(200, completion())) as worker:
        plane.join("w0", "http://127.0.0.1:1", holds=3, api_endpoints=("embeddings",))
        plane.join("w1", worker.base_url)
        answered = await plane.post()
        assert answered.headers["x-worker-instance-id"] == "w1"
    (excluded,) = plane.routing.decisions.newest(1)[0].decision.excluded
    assert excluded.reason == "endpoint completions: the worker states embeddings"


async def test_an_endpoint_whose_worker_drains_is_503(plane: Plane) -> None:
    plane.join("w0", "http://127.0.0.1:1")
    plane.join("w1", "http://127.0.0.1:1", api_endpoints=STATES)
    await plane.clock.advance(10.0)
    plane.hear("w0")
    answered = await plane.post(body(), EMBEDDINGS)
    assert (answered.status, answered.error["code"]) == (503, "no_eligible_worker")
    assert "endpoint embeddings: the worker states chat, completions" in answered.error["message"]


async def test_a_pin_to_a_worker_that_does_not_state_it_is_the_clients_fault(plane: Plane) -> None:
    plane.join("w0", "http://127.0.0.1:1")
    plane.join("w1", "http://127.0.0.1:1", api_endpoints=STATES)
    answered = await plane.post(body(), EMBEDDINGS, x_worker_instance_id="w0")
    assert (answered.status, answered.error["code"]) == (400, "no_such_worker")


async def test_workers_of_embeddings_alone_stand_in_for_each_other(plane: Plane) -> None:
    async with Upstream(answers(500)) as failing, Upstream(GOOD) as good:
        plane.join("w0", failing.base_url, api_endpoints=("embeddings",))
        plane.join("w1", good.base_url, api_endpoints=("embeddings",))
        answered = [await plane.post(body(), EMBEDDINGS) for _ in range(4)]
        assert failing.received
    assert {(each.status, each.body) for each in answered} == {(200, ANSWER)}


@pytest.mark.parametrize("length", [1000, 4 << 20], ids=["small", "4 MiB"])
async def test_an_answer_that_is_cut_after_its_first_byte_comes_from_another_worker(plane: Plane, length: int) -> None:
    begun = says(CUT_HEAD % length + b" " * (length // 2))
    async with Upstream(begun) as failing, Upstream(GOOD) as good:
        plane.join("w0", failing.base_url, api_endpoints=STATES)
        plane.join("w1", good.base_url, api_endpoints=STATES)
        answered = [await plane.post(body(), EMBEDDINGS) for _ in range(4)]
        assert failing.received
    assert {(each.status, each.body) for each in answered} == {(200, ANSWER)}
    assert plane.metric("retries_total", phase="body") >= 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 7}, "model"),
        ({"kv_prompt_ids": "AAAA"}, "kv_prompt_ids"),
    ],
)
async def test_what_the_endpoint_does_not_have_is_refused_by_its_key(
    plane: Plane, fields: dict[str, Any], param: str
) -> None:
    plane.join("w0", "http://127.0.0.1:1", api_endpoints=STATES)
    answered = await plane.post(body(**fields), EMBEDDINGS)
    assert (answered.status, answered.error["param"]) == (400, param)


async def test_a_route_of_embeddings_is_named_by_the_query(plane: Plane) -> None:
    plane.join("w0", "http://127.0.0.1:1")
    plane.join("w1", "http://127.0.0.1:1", api_endpoints=STATES)
    answered = await plane.post(body(), "/v1/route?endpoint=embeddings")
    decision = json.loads(answered.body)["decision"]
    assert (answered.status, decision["endpoint"]) == (200, "embeddings")
    assert decision["candidates"][decision["winner"]]["worker_id"] == "w1"
    refused = await plane.post(body(), "/v1/route?endpoint=images")
    assert refused.error["message"].startswith('endpoint: found "images", allowed one of chat')


@pytest.mark.parametrize("mode", ["round-robin", "random", "power-of-two"])
async def test_a_mode_that_reads_no_overlap_stays(mode: str) -> None:
    async with running_plane(policy=Policy(mode=mode)) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        assert (await plane.post(body(), EMBEDDINGS)).status == 200
        assert plane.routing.decisions.newest(1)[0].decision.policy == mode
