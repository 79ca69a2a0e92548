"""`router --worker`: one command before engines that run already, whose events are real ZeroMQ messages."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from bench.processes import ChildProcess, free_ports
from tests.support.processes import running_router
from tests.system.e2e.client import Answered, Client
from tests.system.e2e.computing_engines import Computing, ComputingSglang, ComputingVllm
from tests.system.e2e.typed import typed
from tests.system.integration.broker import eventually
from tests.system.integration.event_path import zmq_context

MODEL = "llama"
NO_EVENTS = "no events; approximate"
WAIT_S = 40.0


class Routed(NamedTuple):
    """A router that attaches engines."""

    client: Client
    process: ChildProcess

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.session.get(f"{self.client.control_url}{path}") as response:
            return response.status, await response.json()

    async def trust(self) -> dict[str, tuple[str, str]]:
        """Return trust and reason of each worker that takes requests."""
        _, found = await self.get("/v1/workers")
        return {
            worker["registration"]["worker_id"]: (rank["trust"], rank["trust_reason"])
            for worker in found["workers"]
            for rank in worker["ranks"]
            if not worker["unfit"]
        }

    async def until_trust(self, expected: dict[str, tuple[str, str]]) -> None:
        async def is_so() -> bool:
            return await self.trust() == expected

        await eventually(is_so, timeout_s=WAIT_S)

    async def complete(self, prompt: str) -> Answered:
        return await self.client.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4})


@asynccontextmanager
async def router(*arguments: str) -> AsyncIterator[Routed]:
    async with (
        running_router("--set", "nats.port=0", "--text", "byte", *arguments) as router,
        aiohttp.ClientSession() as session,
    ):
        yield Routed(Client(session, router.data_url, router.control_url), router.process)


@asynccontextmanager
async def engines(*kinds: type[Computing]) -> AsyncIterator[list[Computing]]:
    async with zmq_context() as context, AsyncExitStack() as cleanup:
        yield [await cleanup.enter_async_context(kind(model=MODEL).computing(context)) for kind in kinds]


def worker(engine: Computing, name: str, **options: str) -> list[str]:
    """Return the flag for the engine; a vLLM does not say where it publishes."""
    if isinstance(engine, ComputingVllm):
        options = {"kv-events": engine.events} | options
    return ["--worker", ",".join([engine.url, f"id={name}", *(f"{key}={value}" for key, value in options.items())])]


async def test_two_kinds_of_engines_are_attached_by_one_process_and_known_exactly() -> None:
    kinds = (ComputingVllm, ComputingVllm, ComputingSglang, ComputingSglang)
    async with engines(*kinds) as attached:
        flags = [flag for number, each in enumerate(attached) for flag in worker(each, f"w{number}")]
        async with router(*flags) as routed:
            await routed.until_trust({f"w{number}": ("EXACT", "") for number in range(4)})
            blocks = 300 // 16

            async def reused() -> int:
                answered = await routed.complete("abc" * 100)
                cached = answered.body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert answered.overlap_blocks * 16 <= cached
                return int(answered.overlap_blocks)

            async def is_known() -> bool:
                return await reused() == blocks

            assert await reused() == 0
            await eventually(is_known, timeout_s=WAIT_S)
            children = psutil.Process(routed.process.pid).children(recursive=True)
            assert [each.name() for each in children] == ["nats-server"]
            lines = [line for line in routed.process.output.splitlines() if line.startswith("worker ")]
            assert len(lines) == 4
            assert "try it twice" in routed.process.output


async def test_engines_that_are_dead_or_mistyped_or_silent_take_no_other_one_away() -> None:
    async with engines(ComputingVllm, ComputingVllm, ComputingSglang) as (good, mistyped, silent):
        silent.is_telling = False
        assert isinstance(silent, ComputingSglang)
        silent.kv_events_config = None
        dead, unused = free_ports(2)
        wrong = {"kv-events": f"tcp://127.0.0.1:{unused}"}
        flags = [*worker(good, "good"), *worker(mistyped, "mistyped", **wrong), *worker(silent, "silent")]
        async with router(*flags, "--worker", f"http://127.0.0.1:{dead},id=dead") as routed:
            nothing = ("FALLBACK", NO_EVENTS)
            await routed.until_trust({"good": ("EXACT", ""), "mistyped": nothing, "silent": nothing})
            status, ready = await routed.get("/ready")
            assert (status, ready["ready"], ready["reasons"]) == (200, True, [])
            assert {note.split("/")[0] for note in ready["notes"]} == {"mistyped", "silent"}
            _, found = await routed.get("/v1/workers")
            (rank,) = next(each["ranks"] for each in found["workers"] if each["registration"]["worker_id"] == "silent")
            assert rank["event_flag"] in routed.process.output.replace('\\"', '"')
            assert [each["worker_id"] for each in found["waiting"]] == ["dead"]
            good.is_healthy = False

            async def is_gone() -> bool:
                return "good" not in await routed.trust()

            await eventually(is_gone, timeout_s=WAIT_S)
            answered = [await routed.complete("abc" * 100) for _ in range(3)]
            assert len({each.worker for each in answered}) == 1


async def test_engines_come_and_go_while_the_router_runs(tmp_path: Path) -> None:
    async with engines(*[ComputingSglang] * 4) as (named, first, second, third):
        listed = tmp_path / "workers"
        listed.write_text(f"# two\n{first.url},id=a\n\n{second.url},id=b\n")
        async with router(*worker(named, "named"), "--workers-from", str(listed)) as routed:
            known = ("EXACT", "")
            always = {"named": known}
            await routed.until_trust(always | {"a": known, "b": known})
            listed.write_text(f"{second.url},id=b\n")
            await routed.until_trust(always | {"b": known})
            workers = f"{routed.client.control_url}/v1/workers"
            for body, status in (({"url": f"{third.url},id=c"}, 202), ({"url": f"{third.url},id=c"}, 400)):
                async with routed.client.session.post(workers, json=body) as response:
                    assert response.status == status
            await routed.until_trust(always | {"b": known, "c": known})
            async with routed.client.session.delete(f"{workers}/c") as response:
                assert response.status == 202
            await routed.until_trust(always | {"b": known})


async def test_event_addresses_that_were_swapped_are_named_within_32_requests() -> None:
    async with engines(ComputingVllm, ComputingVllm) as (first, second):
        flags = worker(first, "a", **{"kv-events": second.events})
        flags += worker(second, "b", **{"kv-events": first.events})
        async with router(*flags) as routed:
            await routed.until_trust({"a": ("EXACT", ""), "b": ("EXACT", "")})
            for number in range(32):
                assert (await routed.complete(f"{number} " * 100)).status == 200

            async def are_named() -> bool:
                _, found = await routed.get("/v1/workers")
                return {each["registration"]["worker_id"]: each["differs"] for each in found["workers"]} == {
                    "a": [{"field": "kv_events", "found": "those of b/0", "allowed": "those of a/0"}],
                    "b": [{"field": "kv_events", "found": "those of a/0", "allowed": "those of b/0"}],
                }

            await eventually(are_named, timeout_s=WAIT_S)


async def test_a_router_that_cannot_read_the_model_s_directory_says_what_to_run() -> None:
    async with engines(ComputingVllm) as (engine,):
        places = ("--port", "0", "--control-port", "0", "--set", "nats.port=0")
        ended = await typed("-m", "router", *places, *worker(engine, "a"))
        assert (ended.code, "allowed the model's directory: router --worker URL --text DIR" in ended.err) == (1, True)
