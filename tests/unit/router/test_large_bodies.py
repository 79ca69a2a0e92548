"""Large bodies at the router, over real sockets: read on a thread, refused by name, forwarded byte for byte."""

import json
from typing import Any

import pytest

from router.http.limits import HttpLimits
from tests.unit.router.plane import CHAT, running_plane
from tests.unit.router.upstream import Upstream, answers, completion

GOOD = answers(200, completion())
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 60_000}}
WITH_IMAGE = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what is this?"}]}]
LONG_IDS = list(range(100_000, 140_000))
BOUND = HttpLimits(body_bytes_max=16 << 20, drain_s=0.0)


@pytest.mark.parametrize("is_ours", [False, True])
async def test_a_body_with_an_image_comes_to_the_worker_as_it_was_sent(*, is_ours: bool) -> None:
    async with running_plane(limits=BOUND) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, accepts_token_ids=is_ours)
        sent = json.dumps({"model": "m", "messages": WITH_IMAGE}).encode()
        assert (await plane.post(sent, CHAT)).status == 200
    assert worker.received[0].body == sent


@pytest.mark.parametrize(("size", "has_ids"), [(1_000_000, True), (2_000_000, False)])
async def test_token_ids_that_would_exceed_the_workers_bound_are_left_out(size: int, *, has_ids: bool) -> None:
    async with running_plane(limits=BOUND) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, max_seq_len=1 << 30)
        sent = json.dumps({"model": "m", "prompt": "x" * size}).encode()
        assert (await plane.post(sent)).status == 200
    assert worker.received[0].body.startswith(b'{"kv_prompt_ids":') is has_ids
    assert worker.received[0].body.endswith(sent[1:])


@pytest.mark.parametrize("prompt", [LONG_IDS, [LONG_IDS]])
async def test_a_long_prompt_of_ids_is_routed_by_them(prompt: Any) -> None:
    async with running_plane(limits=BOUND) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, max_seq_len=1 << 20)
        assert (await plane.post({"prompt": prompt})).status == 200
        decided = await plane.post({"prompt": prompt}, "/v1/route")
    assert json.loads(decided.body)["decision"]["isl_tokens"] == len(LONG_IDS)
    assert json.loads(worker.received[0].body)["prompt"] == prompt


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (
            {"messages": [[]] * 70_000},
            413,
            "body",
            "found more than 65536 values in the body, allowed at most 65536",
        ),
        ({"messages": [{}], "tools": [{"a": 0}] * 40_000}, 413, "body", "allowed at most 65536"),
        (
            {"messages": [{}], "response_format": {"a": "x" * 1_100_000}},
            413,
            "response_format",
            "bytes outside the prompts",
        ),
        ({"messages": [{"role": "user", "content": "x" * 9_000_000}]}, 413, "messages", "(data.prompt_bytes_max)"),
        ({"messages": WITH_IMAGE, "n": None, "nvext": "x"}, 400, "nvext", 'found "x", allowed'),
    ],
)
async def test_what_may_not_be_is_refused_by_name(body: Any, status: int, param: str, words: str) -> None:
    async with running_plane(limits=BOUND) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        answered = await plane.post(json.dumps({"model": "m", **body}).encode(), CHAT)
    assert (answered.status, answered.error["param"]) == (status, param)
    assert words in answered.error["message"]
    assert worker.received == []


async def test_both_phases_of_a_request_get_its_image() -> None:
    handed = {"choices": [{"index": 0, "finish_reason": "length", "disaggregated_params": {}}]}
    async with (
        running_plane(limits=BOUND) as plane,
        Upstream(answers(200, json.dumps(handed).encode())) as prefill,
        Upstream(GOOD) as decode,
    ):
        plane.join("p0", prefill.base_url, role="prefill")
        plane.join("d0", decode.base_url, role="decode")
        sent = json.dumps({"model": "m", "max_tokens": 5, "messages": WITH_IMAGE}).encode()
        assert (await plane.post(sent, CHAT)).status == 200
    assert [json.loads(each.received[0].body)["messages"] for each in (prefill, decode)] == [WITH_IMAGE] * 2
