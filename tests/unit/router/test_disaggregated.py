"""Prompts computed by one worker and decoded by another, over real sockets: which way requests take, and why."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_protocol.ids import WorkerRank
from router.decision.policy import Policy
from router.http.limits import HttpLimits
from router.request.request import Request
from tests.unit.router.plane import CHAT, PROMPT, Plane, reset, running_plane, until
from tests.unit.router.role_workers import RoleWorker, streamed_text, text_of
from tests.unit.router.upstream import Exchange, Script, Upstream, answers, says, says_and_waits

BODY: dict[str, Any] = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
LOST = says(b"HTTP/1.1 200 OK\r\ncontent-")


@dataclass
class Fleet:
    """The router, and its workers by name."""

    plane: Plane
    workers: dict[str, RoleWorker] = field(default_factory=dict)

    def reroutes(self) -> dict[str, int]:
        """Return which other ways requests took."""
        names = ("no_prefill_worker", "prefill_failed", "no_decode_worker", "decode_failed", "migrated")
        found = {name: int(self.plane.metric("request_turns_total", reason=name)) for name in names}
        return {name: count for name, count in found.items() if count}

    def fail_first(self, fault: Script, *names: str) -> None:
        """Whichever of these workers is asked first does this instead of answering."""

        async def once(exchange: Exchange) -> None:
            for name in names:
                self.workers[name].fault = None
            await fault(exchange)

        for name in names:
            self.workers[name].fault = once

    async def ask(self, **changed: Any) -> str:
        """Return the text of a stream that is whole."""
        answered = await self.plane.post(BODY | changed)
        assert answered.status == 200, answered.body
        return streamed_text(answered.body)


@asynccontextmanager
async def fleet(
    *roles: str, domains: dict[str, str] | None = None, dtypes: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Fleet]:
    """Run a router with a worker for each role, named after it: p0, p1, d2, ..."""
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(running_plane(**options))
        found = Fleet(plane)
        for number, role in enumerate(roles):
            worker, name = RoleWorker(role), f"{role[0]}{number}"
            upstream = await stack.enter_async_context(Upstream(worker))
            domain, dtype = (domains or {}).get(name, ""), (dtypes or {}).get(name, "bfloat16")
            plane.join(name, upstream.base_url, role=role, transfer_domain=domain, kv_cache_dtype=dtype)
            found.workers[name] = worker
        yield found


async def test_a_prompt_is_computed_by_one_worker_and_decoded_by_another() -> None:
    async with fleet("prefill", "decode") as found:
        answered = await found.plane.post(BODY)
        assert streamed_text(answered.body) == text_of(PROMPT, 6)
        assert answered.headers["x-worker-instance-id"] == "d1"
        assert [len(worker.bodies) for worker in found.workers.values()] == [1, 1]
        assert found.workers["d1"].fetched == [1]
        assert found.reroutes() == {}
        assert found.plane.outcomes() == {"ok": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_first_token_that_was_the_last_is_the_answer(stream: bool) -> None:
    async with fleet("prefill", "decode") as found:
        found.workers["p0"].is_final = True
        answered = await found.plane.post(BODY if stream else {"max_tokens": 6})
        text = streamed_text(answered.body) if stream else json.loads(answered.body)["choices"][0]["text"]
        assert text == text_of(PROMPT, 1)
        assert b"disaggregated_params" not in answered.body
        assert found.workers["d1"].bodies == []
        assert found.plane.outcomes() == {"ok": 1}


async def test_a_request_for_one_token_leaves_no_kv_at_a_prefill_worker() -> None:
    async with fleet("prefill", "decode") as found:
        assert await found.ask(max_tokens=1) == text_of(PROMPT, 1)
        assert found.workers["p0"].bodies == []


async def test_a_prefill_worker_that_fails_is_replaced_by_another_and_then_by_the_decode_worker() -> None:
    async with fleet("prefill", "prefill", "decode", retry_limit=1) as found:
        first, second = found.workers["p0"], found.workers["p1"]
        first.fault = LOST
        second.fault = LOST
        assert await found.ask() == text_of(PROMPT, 6)
        assert len(first.bodies) == len(second.bodies) == 1
        assert found.reroutes() == {"prefill_failed": 1}


@pytest.mark.parametrize("at", ["on_head", "on_first_byte", "on_end"])
async def test_a_fault_of_the_router_in_a_prefill_call_is_a_failure_of_the_call(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fault(exchange: Exchange) -> None:
        monkeypatch.setattr(Request, at, fails)
        body = b"{" if at == "on_first_byte" else b"{}"
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + body)

    def fails(*_: object) -> None:
        monkeypatch.undo()
        raise ValueError("planted")

    async with fleet("prefill", "decode") as found:
        found.workers["p0"].fault = fault
        assert await found.ask() == text_of(PROMPT, 6)
        assert found.plane.outcomes() == {"ok": 1}


async def test_without_an_eligible_prefill_worker_a_decode_worker_computes_the_prompt() -> None:
    async with fleet("prefill", "decode", dtypes={"p0": "fp8", "d1": "bfloat16"}) as found:
        assert await found.ask() == text_of(PROMPT, 6)
        assert found.workers["p0"].bodies == []
        assert found.reroutes() == {"no_prefill_worker": 1}


async def test_a_prefill_worker_is_named_only_by_an_answer_from_its_kv() -> None:
    async with fleet("prefill", "decode", "aggregated") as found:
        found.workers["d1"].fault = answers(503, b"{}", retry_after="1")
        answered = await found.plane.post(BODY)
        assert answered.headers["x-worker-instance-id"] == "a2"
        assert "x-prefill-instance-id" not in answered.headers


async def test_a_busy_decode_worker_leaves_the_handoff_to_another() -> None:
    async with fleet("prefill", "decode", "decode") as found:
        found.fail_first(answers(503, b"{}", retry_after="1"), "d1", "d2")
        texts = [await found.ask() for _ in range(4)]
        assert texts == [text_of(PROMPT, 6)] * 4
        assert len(found.workers["p0"].bodies) == 4
        assert found.reroutes() == {}


async def test_a_handoff_that_was_taken_and_lost_means_another_prefill() -> None:
    async with fleet("prefill", "decode", "decode", breaker_failures=9) as found:
        found.fail_first(LOST, "d1", "d2")
        assert await found.ask() == text_of(PROMPT, 6)
        assert len(found.workers["p0"].bodies) == 2
        assert found.reroutes() == {"decode_failed": 1}


async def test_a_request_that_every_decode_worker_fails_is_told_of_the_last_failure() -> None:
    async with fleet("prefill", "decode", "decode") as found:
        found.workers["d1"].fault = found.workers["d2"].fault = LOST
        answered = await found.plane.post(BODY)
        assert (answered.status, answered.error["code"]) == (502, "upstream_failed")
        assert found.reroutes() == {"decode_failed": 2, "no_decode_worker": 1}


async def test_what_the_prefill_worker_refuses_is_refused() -> None:
    async with fleet("prefill", "decode") as found:
        found.workers["p0"].fault = answers(400, b'{"error":{"message":"no"}}')
        answered = await found.plane.post(BODY)
        assert (answered.status, answered.body) == (400, b'{"error":{"message":"no"}}')
        assert found.plane.outcomes() == {"refused": 1}


async def test_kv_is_decoded_only_by_a_worker_that_can_take_it() -> None:
    dtypes = {"p0": "fp8", "d1": "bfloat16", "d2": "fp8"}
    async with fleet("prefill", "decode", "decode", dtypes=dtypes) as found:
        for _ in range(4):
            await found.ask()
        assert [len(worker.bodies) for worker in found.workers.values()] == [4, 0, 4]
        assert found.reroutes() == {}
        route = await found.plane.post(BODY, "/v1/route")
        assert "allowed fp8 as prefill worker p0 has" in route.body.decode()


async def test_a_short_prompt_is_computed_where_it_is_decoded_if_that_is_configured() -> None:
    limits = {"conditional": "isl_bounding", "effective_isl_tokens": 32}
    async with fleet("prefill", "decode", disaggregation=limits) as found:
        found.plane.join("d1", found.plane.state.fleet.worker("d1").registration.base_url, role="decode", holds=3)  # type: ignore[union-attr]
        assert await found.ask() == text_of(PROMPT, 6)
        assert found.workers["p0"].bodies == []
        assert found.plane.metric("prefill_placements_total", reason="short") == 1


async def test_a_client_that_leaves_before_decode_has_begun_leaves_no_kv_behind() -> None:
    async with fleet("prefill", "decode") as found:
        held, asked = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            asked.set()
            await held.wait()

        found.workers["d1"].waits = wait
        _, writer = await found.plane.dial(BODY)
        await asked.wait()
        writer.close()
        await until(lambda: found.plane.outcomes() == {"cancelled": 1})
        held.set()
        await until(lambda: found.workers["d1"].fetched == [1])


async def test_a_client_that_leaves_while_a_decode_worker_is_sought_leaves_no_kv_behind() -> None:
    async with fleet("prefill", "decode", "decode") as found:
        found.fail_first(answers(503, b"{}", retry_after="1"), "d1", "d2")
        _, writer = await found.plane.dial(BODY)
        await until(lambda: any(worker.bodies for name, worker in found.workers.items() if name != "p0"))
        reset(writer)
        await until(lambda: [worker.fetched for worker in found.workers.values()].count([1]) == 1)
        await until(lambda: found.plane.outcomes() == {"cancelled": 1})


async def test_kv_of_a_client_that_left_is_fetched_even_if_no_worker_meets_the_targets() -> None:
    async with fleet("prefill", "decode", "decode", policy=Policy(mode="predicted-ttft")) as found:
        found.fail_first(answers(503, b"{}", retry_after="1"), "d1", "d2")
        _, writer = await found.plane.dial(BODY)
        await until(lambda: any(worker.bodies for name, worker in found.workers.items() if name != "p0"))
        found.plane.routing.set_policy(Policy(mode="predicted-ttft", itl_target_s=1e-6, unmet="reject"))
        reset(writer)
        await until(lambda: found.plane.outcomes() == {"cancelled": 1})
        async with asyncio.timeout(5.0):
            await until(lambda: [worker.fetched for worker in found.workers.values()].count([1]) == 1)
        assert found.plane.metric("rejected_total", reason="unmet_target") == 0


async def test_a_clients_own_handoff_is_refused_unless_this_router_serves_a_pool() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt_token_ids": [1]}
    async with fleet("prefill", "decode") as found:
        answered = await found.plane.post(BODY | {"disaggregated_params": {"request_type": "context_only"}})
        assert (answered.status, answered.error["param"]) == (400, "disaggregated_params")
        assert "disaggregation.accept_params" in answered.error["message"]
        answered = await found.plane.post(json.dumps(chat).encode(), CHAT)
        assert (answered.status, answered.error["param"]) == (400, "disaggregated_params")


async def test_both_decisions_can_be_asked_for_without_a_request() -> None:
    async with fleet("prefill", "decode") as found:
        told = json.loads((await found.plane.post(path="/v1/route")).body)
        assert (told["decision"]["phase"], told["decode"]["decision"]["phase"]) == ("prefill", "decode")
        assert "(prefill), " in told["explanation"]
        assert " would go to p0/0 because there was no other candidate.\n" in told["explanation"]


@pytest.mark.parametrize("roles", [("aggregated", "aggregated"), ("prefill", "decode", "decode"), ("decode", "decode")])
@pytest.mark.parametrize("cut_after", [1, 3, 5])
async def test_a_stream_whose_worker_dies_goes_on_without_a_seam(roles: tuple[str, ...], cut_after: int) -> None:
    async with fleet(*roles) as found:
        for worker in found.workers.values():
            worker.cut_after = cut_after
            if worker.role != "prefill":
                break
        texts = [await found.ask() for _ in range(3)]
        assert texts == [text_of(PROMPT, 6)] * 3
        assert found.reroutes() == {"migrated": 1}
        assert found.plane.outcomes() == {"ok": 3}


async def test_an_agents_stream_does_not_go_on_at_an_attached_trtllm_serve() -> None:
    async with fleet("aggregated") as found, Upstream(answers(200, b"{}")) as attached:
        found.workers["a0"].cut_after = 3
        found.plane.index.held[WorkerRank("a0", 0)] = 4
        found.plane.join("e1", attached.base_url, event_source="trtllm", accepts_token_ids=False)
        answered = await found.plane.post(BODY)
        assert b'"error"' in answered.body
        assert attached.received == []


async def test_an_error_in_answer_to_a_resumed_stream_is_not_passed_on_into_it() -> None:
    async with fleet("aggregated", "aggregated", retry_limit=0) as found:
        found.plane.index.held = {rank: 3 * (rank.worker_id == "a0") for rank in found.plane.index.held}
        found.workers["a0"].cut_after = 2
        found.workers["a1"].fault = answers(404, b"not found")
        answered = await found.plane.post(BODY)
        assert b"worker a1/0 failed: first_byte: status 404 to an answer that was to go on" in answered.body
        assert answered.body.endswith(b"data: [DONE]\n\n")
        assert found.plane.metric("streams_lost_total", reason="no_worker") == 1


async def test_a_stream_that_lost_only_its_end_is_whole() -> None:
    async with fleet("aggregated", "aggregated") as found:
        for worker in found.workers.values():
            worker.cut_after = 6
        answered = [await found.plane.post(BODY) for _ in range(2)]
        assert [streamed_text(each.body) for each in answered] == [text_of(PROMPT, 6)] * 2
        assert found.reroutes() == {}


async def test_a_stream_migrates_no_more_often_than_is_allowed() -> None:
    async with fleet("aggregated", "aggregated", migration_limit=1, retry_limit=0) as found:
        for worker in found.workers.values():
            worker.cut_after = 2
        answered = await found.plane.post(BODY)
        assert b'"code":"upstream_failed"' in answered.body.replace(b" ", b"")
        assert found.reroutes() == {"migrated": 1}
        assert found.plane.outcomes() == {"failed": 1}


@pytest.mark.parametrize(("silent", "reroutes"), [("p", {}), ("d", {"decode_failed": 1})])
async def test_a_silent_worker_of_either_role_is_left_for_another(silent: str, reroutes: dict[str, int]) -> None:
    limits = HttpLimits(sweep_s=0.02, drain_s=0.0)
    async with fleet("prefill", "prefill", "decode", "decode", limits=limits) as found:
        of_role = [name for name in found.workers if name.startswith(silent)]
        for name in of_role:
            found.workers[name].fault = says_and_waits(b"")
        asked = asyncio.ensure_future(found.ask())
        await until(lambda: any(found.workers[name].bodies for name in of_role))
        for name in of_role:
            found.workers[name].fault = None
        await found.plane.fall_silent(*(name for name in of_role if found.workers[name].bodies))
        assert await asked == text_of(PROMPT, 6)
        assert found.reroutes() == reroutes


async def test_what_has_to_obey_a_form_does_not_migrate() -> None:
    async with fleet("aggregated", "aggregated") as found:
        for worker in found.workers.values():
            worker.cut_after = 2
        answered = await found.plane.post(BODY | {"response_format": {"type": "json_object"}})
        assert b"upstream_failed" in answered.body
        assert found.reroutes() == {}


async def test_prefill_and_decode_worker_can_be_named() -> None:
    async with fleet("prefill", "prefill", "decode", "decode") as found:
        for prefill, decode in (("p0", "d3"), ("p1", "d2")):
            named = {"nvext": {"prefill_worker_id": prefill, "decode_worker_id": decode}}
            assert await found.ask(**named) == text_of(PROMPT, 6)
        assert [len(worker.bodies) for worker in found.workers.values()] == [1, 1, 1, 1]
        assert [worker.fetched for worker in found.workers.values()] == [[], [], [1], [1]]
