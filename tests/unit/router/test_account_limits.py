"""Requests of accounts with limits: refused beyond them, charged by what they cost, named by their account."""

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.unit.router.plane import PROMPT, Plane, running_plane, until
from tests.unit.router.role_workers import RoleWorker, streamed_text, text_of
from tests.unit.router.upstream import DONE, STREAM_HEAD, Exchange, Upstream, answers, chunked, event, streams

KEY = {"authorization": "Bearer kv-1"}
ANSWER = b'{"id":"a","choices":[{"index":0,"text":"hi"}],"usage":{"prompt_tokens":64,"completion_tokens":36}}'


def data(tmp_path: Path, **limits: int) -> dict[str, Any]:
    stated = "".join(f"    {name}: {amount}\n" for name, amount in limits.items())
    file = tmp_path / "accounts.yaml"
    file.write_text(f"accounts:\n  - name: team-a\n    keys: [{sha256(b'kv-1').hexdigest()}]\n{stated}")
    return {"accounts_file": str(file)}


async def refusal_of(plane: Plane) -> tuple[int, str, str]:
    answered = await plane.post(**KEY)
    return answered.status, answered.error["param"], answered.headers["retry-after"]


async def test_requests_beyond_a_rate_are_refused_until_there_is_room(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 1}
    async with running_plane(data=data(tmp_path, **limits)) as plane, Upstream(answers(200, ANSWER)) as worker:
        plane.join("w0", worker.base_url)
        assert (await plane.post(**KEY)).status == 200
        assert await refusal_of(plane) == (429, "requests_per_minute", "60")
        assert plane.metric("rejected_total", reason="requests_per_minute") == 1
        assert len(worker.received) == 1


async def test_an_answer_costs_its_prompt_and_its_tokens(tmp_path: Path) -> None:
    limits = {"tokens_per_minute": 90, "tokens_per_day": 1000}
    async with running_plane(data=data(tmp_path, **limits)) as plane, Upstream(answers(200, ANSWER)) as worker:
        plane.join("w0", worker.base_url)
        assert (await plane.post(**KEY)).status == 200
        assert await refusal_of(plane) == (429, "tokens_per_minute", "7")  # 11 tokens are missing


async def test_a_stream_that_its_client_leaves_costs_what_had_come(tmp_path: Path) -> None:
    has_begun = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(event()))
        await has_begun.wait()
        await exchange.send(chunked(event()) * 29)
        await exchange.until_gone()

    limits = {"tokens_per_minute": len(PROMPT) + 30}
    async with running_plane(data=data(tmp_path, **limits)) as plane, Upstream(script) as worker:
        plane.join("w0", worker.base_url)
        reader, writer = await plane.dial({"stream": True}, headers=b"authorization: Bearer kv-1\r\n")
        await reader.readuntil(event())
        has_begun.set()
        for _ in range(29):
            await reader.readuntil(event())
        writer.close()
        await until(lambda: plane.serving.metrics.inflight == 0)
        status, code, _ = await refusal_of(plane)
        assert (status, code) == (429, "tokens_per_minute")


async def test_a_stream_that_the_router_ends_costs_what_had_come(tmp_path: Path) -> None:
    limits, worker = {"tokens_per_minute": len(PROMPT) + 6}, RoleWorker()
    worker.cut_after = 6
    async with running_plane(data=data(tmp_path, **limits)) as plane, Upstream(worker) as upstream:
        plane.join("w0", upstream.base_url)
        answered = await plane.post({"stream": True, "max_tokens": 6}, **KEY)
        assert streamed_text(answered.body, (0,)) == text_of(PROMPT, 6)
        status, code, _ = await refusal_of(plane)
        assert (status, code) == (429, "tokens_per_minute")


async def test_a_resumed_stream_that_its_client_leaves_costs_what_both_workers_sent(tmp_path: Path) -> None:
    limits, worker = {"tokens_per_minute": len(PROMPT) + 6}, RoleWorker()
    worker.cut_after = worker.stays_after = 3
    async with running_plane(data=data(tmp_path, **limits)) as plane, Upstream(worker) as w0, Upstream(worker) as w1:
        plane.join("w0", w0.base_url)
        plane.join("w1", w1.base_url)
        body = {"stream": True, "max_tokens": 9}
        reader, writer = await plane.dial(body, headers=b"authorization: Bearer kv-1\r\n")
        for _ in range(6):
            await reader.readuntil(b"}\n\n")
        writer.close()
        await until(lambda: plane.serving.metrics.inflight == 0)
        status, code, _ = await refusal_of(plane)
        assert (status, code) == (429, "tokens_per_minute")


async def test_the_account_is_the_tenant(tmp_path: Path) -> None:
    async with (
        running_plane(data=data(tmp_path), queue={"fair_share_by": "api_key"}) as plane,
        Upstream(streams(event(), DONE)) as worker,
    ):
        plane.join("w0", worker.base_url)
        answered = await plane.post({"stream": True}, **KEY, **{"x-request-id": "r"})
        assert answered.status == 200
        assert "authorization" not in worker.received[0].headers
        record = plane.routing.decisions.find("r")
        assert record is not None
        assert record.verdict.request.tenant == "team-a"
