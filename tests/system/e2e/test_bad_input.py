"""What may not be sent is answered with an OpenAI body that names the field, what was found and what is allowed."""

from typing import Any

import pytest

from tests.system.e2e.client import MODEL, Client

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, b"{", 400, "body"),
        (CHAT, {"model": MODEL, "messages": []}, 400, "messages"),
        (CHAT, {"model": "gpt-9", "messages": HELLO}, 404, "model"),
        (CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 100_000}, 400, None),
        (CHAT, {"model": MODEL, "messages": HELLO, "kv_prompt_ids": "AAAA"}, 400, "kv_prompt_ids"),
        ("/v1/completions", {"model": MODEL, "prompt": [1, -1]}, 400, "prompt[1]"),
        ("/v1/nothing", {}, 404, None),
    ],
)
async def test_a_bad_request_is_named(client: Client, path: str, body: Any, status: int, param: str | None) -> None:
    answered = await client.post(path, body)
    error = answered.body["error"]
    assert (answered.status, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.asyncio(loop_scope="module")
async def test_an_oversized_body_is_a_413(client: Client) -> None:
    answered = await client.post(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 70_000}]})
    assert answered.status == 413
    assert answered.body["error"]["code"] == "body_too_large"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_method_is_a_405_with_an_openai_body(client: Client) -> None:
    async with client.session.get(f"{client.data_url}{CHAT}") as response:
        assert response.status == 405
        assert "message" in (await response.json())["error"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("rank", ["x", "-1", "7"])
async def test_a_bad_rank_header_is_named(client: Client, rank: str) -> None:
    answered = await client.complete([1, 2, 3], x_dp_rank=rank)
    assert answered.status in (400, 503)
    assert "dp_rank" in answered.body["error"]["message"].replace("-", "_")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pin_to_an_unknown_worker_is_refused_with_the_reason(client: Client) -> None:
    answered = await client.complete([1, 2, 3], x_worker_instance_id="unknown")
    assert (answered.status, answered.body["error"]["code"]) == (400, "no_such_worker")
    assert "pinned to unknown" in answered.body["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_unused_parameters_are_named_in_a_header(client: Client) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "nvext": {"annotations": []}}
    answered = await client.post(CHAT, body)
    assert answered.status == 200
    assert answered.headers["x-ignored-parameters"] == "nvext.annotations"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/decisions?limit=0", 400, "limit"),
        ("/v1/decisions/none", 404, "id"),
        ("/v1/index/position?worker=w0&epoch=x&seq=1", 400, "epoch"),
        ("/v1/index/position?worker=w0&epoch=1&seq=1&timeout_s=0", 504, None),
    ],
)
async def test_a_bad_question_to_the_control_plane_is_named(
    client: Client, path: str, status: int, param: str | None
) -> None:
    async with client.session.get(f"{client.control_url}{path}") as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == param


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_with_a_bad_address_is_not_added(client: Client) -> None:
    async with client.session.post(
        f"{client.control_url}/v1/workers", data=b'{"type":"registered","worker_id":"W 1"}'
    ) as response:
        assert response.status == 400
        assert "fleet event" in (await response.json())["error"]["message"]
