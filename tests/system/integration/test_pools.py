"""`router pools` before scripted routers: which are asked, what they are asked, and what the client gets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from router.config import RouterSettings
from router.pools.selection import Targets
from tests.system.integration.broker import WAIT_S, eventually
from tests.system.integration.pool_routers import MODEL, OK, PoolRouter, Pools, agg, disagg, request, running_pools
from tests.unit.router.upstream import Exchange, Script, answers, says, streams

PARAMS = {"request_type": "context_only", "first_gen_tokens": [7], "ctx_request_id": 3, "encoded_opaque_state": "AAE="}
EVENTS = (b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n', b"data: [DONE]\n\n")
USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}


@contextlib.asynccontextmanager
async def pools(config: dict[str, Any], **scripts: Script | None) -> AsyncIterator[tuple[Pools, dict[str, PoolRouter]]]:
    """Run pools of one scripted router each, by namespace; None: it has died since it was looked at."""
    async with AsyncExitStack() as stack:
        routers = {name: await stack.enter_async_context(PoolRouter(script or OK)) for name, script in scripts.items()}
        running = await stack.enter_async_context(running_pools(config, routers))
        for name, script in scripts.items():
            if script is None:
                routers[name].kill()
        yield running, routers


async def left(router: PoolRouter) -> None:
    """Return once the connection that the router waited on was closed."""
    async with asyncio.timeout(WAIT_S):
        await router.gone.wait()


def prefilled(**more: Any) -> Script:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "disaggregated_params": PARAMS}
    answer = {"id": "x", "object": "text_completion", "choices": [choice], "usage": USAGE}
    return answers(body=msgspec.json.encode(answer | more))


def error(status: int, message: str = "no") -> Script:
    return answers(status, msgspec.json.encode({"error": {"message": message}}), retry_after="7")


# ------------------------------------------------------------------------------------------- one phase


async def test_the_selected_pool_gets_what_the_client_sent_and_its_answer_passes_as_it_is() -> None:
    body = b'{"model":"m", "prompt": "h\\u00e9","nvext":{"router":{"ttft_target":1500}},"temperature":1.50}'
    async with pools(agg(0, 1), p0=OK, p1=answers(body=b'{"choices": [ 1 ]}', x_own="z")) as (running, routers):
        headers = {"x-request-id": "r-1", "x-session-id": "s", "authorization": "Bearer k", "x-dp-rank": "2"}
        status, named, answer = await running.post(body, headers=headers)
        assert (status, answer) == (200, b'{"choices": [ 1 ]}')
        assert (named["x-request-id"], named["x-pool"], named["x-own"]) == ("r-1", "p1", "z")
        (asked,) = routers["p1"].asked
        assert asked.body == body
        assert {name: asked.headers[name] for name in headers} == headers
        assert asked.headers["content-type"] == "application/json"
        assert not routers["p0"].asked


@pytest.mark.parametrize(
    "failing", [error(500), error(503), answers(302), says(b""), None], ids=["500", "503", "302", "cut", "no router"]
)
async def test_a_pool_that_fails_before_its_answer_is_followed_by_faster_ones_and_then_by_slower_ones(
    failing: Script | None,
) -> None:
    async with pools(agg(0, 1, 2), p0=error(502), p1=failing, p2=OK) as (running, routers):
        status, named, _ = await running.post(request(1))
        assert (status, named["x-pool"]) == (200, "p2")
        assert [len(routers[name].asked) for name in ("p0", "p2")] == [1, 1]
        assert await running.metric('kvrouter_pool_attempts_total{outcome="failed",phase="agg",pool="p1"}') == 1
        assert await running.metric('kvrouter_pool_attempts_total{outcome="ok",phase="agg",pool="p2"}') == 1


async def test_the_last_error_is_what_the_client_sees() -> None:
    async with pools(agg(0, 1), p0=error(503, "full"), p1=error(500)) as (running, _):
        status, named, body = await running.post(request(1))
        assert (status, named["retry-after"], named["x-pool"]) == (503, "7", "p0")
        assert msgspec.json.decode(body)["error"]["message"] == "full"
    async with pools(agg(0, 1), p0=None, p1=error(500)) as (running, _):
        status, _, body = await running.post(request(1))
        told = msgspec.json.decode(body)["error"]
        assert (status, told["code"]) == (502, "upstream_failed")
        assert told["message"].startswith("pool p0 failed: connect: ")


async def test_what_the_client_did_wrong_is_not_asked_of_another_pool() -> None:
    async with pools(agg(0, 1), p0=OK, p1=OK) as (running, routers):
        for status in (400, 404, 429):
            routers["p1"].answer = error(status)
            assert (await running.post(request(1)))[0] == status
        assert not routers["p0"].asked


async def test_a_router_that_fails_within_its_answer_ends_it() -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.head(transfer_encoding="chunked")
        await exchange.chunk(EVENTS[0])
        await exchange.cut()

    async with pools(agg(0, 1), p0=OK, p1=broken) as (running, routers):
        _, _, body = await running.post(request(1, stream=True))
        assert body.startswith(EVENTS[0])
        assert b'"upstream_failed"' in body
        assert body.endswith(b"data: [DONE]\n\n")
        assert not routers["p0"].asked
        assert await running.metric('kvrouter_pools_requests_total{outcome="failed"}') == 1


async def test_a_router_that_serves_another_model_is_no_place_to_go() -> None:
    async with pools(agg(0, 1), p0=OK, p1=OK) as (running, routers):
        routers["p1"].models = ["other"]
        await eventually(lambda: running.fitness()["p1"] == "down")
        (reason,) = running.status("p1").reasons
        assert reason.endswith("serves other, wanted m")


async def test_the_routers_of_a_pool_take_turns_and_stand_in_for_each_other() -> None:
    async with PoolRouter() as a, PoolRouter() as b, running_pools(agg(0, retry=False), {"p0": [a, b]}) as running:
        for _ in range(4):
            assert (await running.post(request()))[0] == 200
        assert [len(each.asked) for each in (a, b)] == [2, 2]
        a.kill()
        for _ in range(4):
            assert (await running.post(request()))[0] == 200
        assert len(b.asked) == 6
        await eventually(lambda: running.status("p0").routers_up == (b.base_url,))
        assert running.fitness() == {"p0": "fit"}


async def test_only_so_many_requests_are_served_at_a_time() -> None:
    tree = RouterSettings.model_validate(
        {"data": {"port": 0}, "control": {"port": 0}, "queue": {"inflight_requests_max": 1}}
    )
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        reached.set()
        await go_on.wait()
        await OK(exchange)

    async with PoolRouter(waits) as router, running_pools(agg(0), {"p0": router}, settings=tree) as running:
        first = asyncio.ensure_future(running.post(request()))
        await reached.wait()
        status, named, body = await running.post(request())
        assert (status, named["retry-after"]) == (503, "1")
        assert b"queue.inflight_requests_max: 1 requests are being served" in body
        go_on.set()
        assert (await first)[0] == 200


# ------------------------------------------------------------------------------------------- two phases


async def test_a_prefill_pool_computes_the_prompt_and_a_decode_pool_goes_on_from_there() -> None:
    async with pools(disagg(), pre0=prefilled(), dec0=streams(*EVENTS)) as (running, routers):
        sent = request(stream=True, min_tokens=2)
        status, named, body = await running.post(sent, headers={"x-request-id": "r", "x-worker-instance-id": "d1"})
        assert (status, body) == (200, b"".join(EVENTS))
        assert (named["x-prefill-pool"], named["x-pool"], named["x-request-id"]) == ("pre0", "dec0", "r")
        assert routers["pre0"].bodies == [
            {"model": MODEL, "prompt": "hello", "min_tokens": 1, "stream": False, "max_tokens": 1,
             "disaggregated_params": {"request_type": "context_only"}}
        ]  # fmt: skip
        params = PARAMS | {"request_type": "generation_only", "ctx_usage": USAGE}
        assert routers["dec0"].bodies == [sent | {"disaggregated_params": params}]
        assert "x-worker-instance-id" not in routers["pre0"].asked[0].headers
        assert routers["dec0"].asked[0].headers["x-worker-instance-id"] == "d1"
        assert routers["pre0"].asked[0].headers["x-request-id"] == "r"


async def test_each_phase_asks_its_own_pools_again_and_nothing_is_prefilled_twice() -> None:
    scripts: dict[str, Script | None] = {
        "pre0": error(500), "pre1": prefilled(), "dec0": None, "dec1": answers(body=b'{"whole":1}'),
    }  # fmt: skip
    async with pools(disagg(2, 2), **scripts) as (running, routers):
        status, named, body = await running.post(request())
        assert (status, body) == (200, b'{"whole":1}')
        assert (named["x-prefill-pool"], named["x-pool"]) == ("pre1", "dec1")
        assert [len(routers[name].asked) for name in ("pre0", "pre1", "dec1")] == [1, 1, 1]


@pytest.mark.parametrize(
    "script", [answers(body=b"{}"), says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx")], ids=["unusable", "cut"]
)
async def test_a_prefill_answer_that_cannot_be_used_is_asked_of_the_next_pool(script: Script) -> None:
    scripts = {"pre0": script, "pre1": prefilled(), "dec0": answers(body=b'{"whole":1}'), "dec1": OK}
    async with pools(disagg(2, 2), **scripts) as (running, routers):
        status, named, body = await running.post(request())
        assert (status, body, named["x-prefill-pool"]) == (200, b'{"whole":1}', "pre1")
        assert [len(routers[name].asked) for name in ("pre0", "pre1", "dec0", "dec1")] == [1, 1, 1, 0]


async def test_a_client_that_leaves_during_its_prefill_is_not_decoded() -> None:
    reached = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        reached.set()
        await exchange.until_gone()

    async with pools(disagg(), pre0=waits, dec0=OK) as (running, routers):
        asked = asyncio.ensure_future(running.post(request()))
        await reached.wait()
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await left(routers["pre0"])
        assert not routers["dec0"].asked
        assert await running.metric('kvrouter_pools_requests_total{outcome="cancelled"}') == 1
        assert await running.metric("kvrouter_pools_inflight_requests") == 0


# ------------------------------------------------------------------------------------------- why


async def test_a_dry_run_returns_the_pools_with_reasons_and_calls_no_router() -> None:
    async with pools(disagg(2, 2), pre0=OK, pre1=OK, dec0=OK, dec1=OK) as (running, routers):
        routers["pre1"].ready = False
        await eventually(lambda: running.fitness()["pre1"] == "down")
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 800}], "nvext": {"agent_hints": {}}}
        status, _, body = await running.post(chat, "/v1/pools/select", {"x-request-priority": "3"})
        assert status == 200
        found = msgspec.json.decode(body)
        text_bytes = len(msgspec.json.encode(chat["messages"]))
        assert found["question"]["isl_origin"] == "estimate"
        assert found["question"]["asked"] == {
            "isl_tokens": -(-text_bytes // 4), "targets": {"ttft_ms": None, "itl_ms": None}, "priority": 3,
        }  # fmt: skip
        prefill, decode = found["phases"]
        assert prefill["selection"]["namespace"] == "pre1"
        assert [each["axis"] for each in prefill["selection"]["coordinates"]] == ["isl", "ttft_ms"]
        assert prefill["selection"]["coordinates"][1]["origin"] == "midpoint"
        assert [each["namespace"] for each in prefill["passed_over"]] == ["pre1"]
        assert [each["namespace"] for each in prefill["order"]] == ["pre0", "pre1"]
        (reason,) = prefill["passed_over"][0]["reasons"]
        assert reason.endswith("not ready: no worker is fit")
        assert [each["namespace"] for each in decode["order"]] == ["dec1", "dec0"]
        assert not any(each.asked for each in routers.values())


async def test_a_priority_and_targets_reach_the_grid_and_the_processs_own_stand_for_absent_ones() -> None:
    config = agg(0, 1)
    rules = [{"min_priority": least, "max_priority": most, "target_pool": 0} for least, most in ((5, 9), (0, 0))]
    config["agg_pool_selection_strategy"]["priority_overrides"] = rules
    async with PoolRouter() as p0, PoolRouter() as p1:
        routers = {"p0": p0, "p1": p1}
        async with running_pools(config, routers, defaults=Targets(ttft_ms=1900.0)) as running:
            assert (await running.post(request()))[1]["x-pool"] == "p1"
            assert (await running.post(request(0)))[1]["x-pool"] == "p0"
            for priority, pool in ((5, "p0"), (4, "p1"), (0, "p0")):
                _, named, _ = await running.post(request(nvext={"agent_hints": {"priority": priority}}))
                assert named["x-pool"] == pool
            assert (await running.post(request(), headers={"x-request-priority": "9"}))[1]["x-pool"] == "p0"
            _, _, body = await running.post(request(nvext={"agent_hints": {"priority": 7}}), "/v1/pools/select")
            found = msgspec.json.decode(body)
            assert (found["question"]["isl_origin"], found["question"]["asked"]["isl_tokens"]) == ("unread", None)
            (plan,) = found["phases"]
            told = [plan["selection"][name] for name in ("override", "grid_pool", "pool")]
            assert (*told, plan["selection"]["coordinates"][0]["origin"]) == (0, 1, 0, "default")
            selections = 'kvrouter_pool_selections_total{by="override",phase="agg",pool="p0"}'
            assert await running.metric(selections) == 3


async def test_with_a_tokenizer_lengths_are_counted() -> None:
    async with (
        PoolRouter() as pre0,
        PoolRouter() as dec0,
        running_pools(disagg(), {"pre0": pre0, "dec0": dec0}, text="byte") as running,
    ):
        for prompt in ("hello", "x" * 200_000):
            _, _, body = await running.post(request(prompt=prompt), "/v1/pools/select")
            question = msgspec.json.decode(body)["question"]
            assert (question["isl_origin"], question["asked"]["isl_tokens"]) == ("tokens", len(prompt))


@pytest.mark.parametrize(
    ("body", "headers", "status", "param"),
    [
        (b"{", {}, 400, "body"),
        (request(model="other"), {}, 404, "model"),
        (request(nvext=1), {}, 400, "nvext"),
        (request(), {"x-request-priority": "high"}, 400, "x-request-priority"),
        (request(nvext={"router": {"ttft_target": -1}}), {}, 400, "nvext.router.ttft_target"),
    ],
)  # fmt: skip
async def test_what_a_client_may_not_send_is_refused_by_its_name(
    body: Any, headers: dict[str, str], status: int, param: str
) -> None:
    async with pools(agg(0), p0=OK) as (running, routers):
        for path in ("/v1/completions", "/v1/pools/select"):
            found, _, answer = await running.post(body, path, headers)
            assert (found, msgspec.json.decode(answer)["error"]["param"]) == (status, param)
        assert not routers["p0"].asked
        assert await running.metric('kvrouter_pools_requests_total{outcome="refused"}') == 1


async def test_the_processs_own_endpoints() -> None:
    async with pools(agg(0, 1), p0=OK, p1=OK) as (running, routers):
        assert await running.get("/health") == (200, {"status": "ok"})
        assert (await running.get("/v1/models"))[1]["data"][0]["id"] == MODEL
        assert (await running.get(f"/v1/models/{MODEL}"))[0] == 200
        assert [(await running.get(path))[0] for path in ("/v1/models/x", "/nowhere")] == [404, 404]
        assert (await running.get("/v1/completions"))[0] == 405
        assert set((await running.get("/version"))[1]) == {"version"}
        assert await running.get("/ready", control=True) == (200, {"ready": True, "reasons": [], "notes": []})
        for router in routers.values():
            router.ready = False
        await eventually(lambda: set(running.fitness().values()) == {"down"})
        for control in (False, True):
            status, readiness = await running.get("/ready", control=control)
            assert status == 503
            assert readiness["reasons"][0].startswith("no agg pool is up: p0: ")


async def test_every_pool_is_shown_with_its_place_its_limits_and_how_it_stands() -> None:
    async with pools(agg(3, 1), p0=OK, p1=OK) as (running, routers):
        routers["p1"].queued_requests = 2
        await eventually(lambda: running.status("p1").queued_requests == 2)
        status, shown = await running.get("/v1/pools", control=True)
        assert (status, shown["mode"], shown["enable_priority_retry"]) == (200, "agg", True)
        assert shown["identity"] == {
            "models": ["m"], "namespace": "dynamo", "component_name": "global_router",
            "defaults": {"ttft_ms": None, "itl_ms": None},
        }  # fmt: skip
        (group,) = shown["groups"]
        first, second = group["pools"]
        assert (first["namespace"], first["priority"], first["fitness"]) == ("p0", 3, "fit")
        assert second["routers"] == [{"url": routers["p1"].base_url, "control_url": routers["p1"].base_url}]
        assert (second["queued_requests"], second["limits"]["hold_s"]) == (2, 30.0)
