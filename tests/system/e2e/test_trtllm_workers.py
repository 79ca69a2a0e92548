"""Workers with TensorRT-LLM engines behind a real router: `worker-agent serve --engine trtllm` over the fake package.

w0    aggregated, with a LoRA adapter        w1    aggregated, two attention-DP ranks
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.processes import FleetProcesses, FleetShape
from kv_runtime.clock import SystemClock
from tests.support.metric_families import COMMANDS
from tests.support.processes import BLOCK_SIZE, ENGINE, agent_process, with_fake
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import QUIET_ROUTER
from tests.system.e2e.test_looking_into_a_fleet import verified
from tests.system.e2e.test_metrics_are_documented import families

LORA = "law"
WAIT_S = 30.0
BLOCKS = 60
"""Of a prompt: more than what a worker lately had to do weighs against it."""
TEXT = "Once upon a time there was a cache. " * 8
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
COMPLETION = {"prompt": TEXT}


class TrtllmFleet(FleetProcesses):
    """A router and workers with engines of TensorRT-LLM: `arguments` and what the fake is told, by worker id."""

    def __init__(self, arguments: Mapping[str, tuple[str, ...]], told: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(FleetShape(workers=len(arguments), router_settings=QUIET_ROUTER))
        self._arguments, self._told = arguments, told

    async def start_worker(self, worker_id: str) -> str:
        """The worker runs; return its address."""
        agent = agent_process(worker_id, self.nats_url, *ENGINE, *self._arguments[worker_id])
        await self.add_worker(agent, with_fake(**self._told.get(worker_id, {})))
        return (await agent.line_with(f"worker {worker_id} on")).split()[3]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcesses]:
    lora = tmp_path_factory.mktemp("lora")
    arguments = {
        "w0": ("--set", f"trtllm.loras={{{LORA}: {lora}}}", "--trtllm.enable_lora", "true"),
        "w1": ("--tensor-parallel-size", "2", "--enable-attention-dp"),
    }
    async with TrtllmFleet(arguments, {}) as running:
        yield running


@asynccontextmanager
async def client_of(fleet: FleetProcesses) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, fleet.data_url, fleet.control_url)


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Return once what `holds` finds is true."""
    async with asyncio.timeout(WAIT_S):
        while not await holds():
            await SystemClock().sleep(0.02)


def prompt(seed: int) -> list[int]:
    """Return whole blocks and a token more, like no other seed's."""
    return [(seed * 7 + place * place) % 251 for place in range(BLOCKS * BLOCK_SIZE + 1)]


async def streamed(client: Client, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any] | str]:
    """Return the events of a stream, decoded; the last is `[DONE]` where it ended well. A refusal is one of them."""
    asked = {"model": MODEL, **body, "stream": True, "stream_options": {"include_usage": True}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.session.post(f"{client.data_url}{path}", json=asked, headers=named) as response:
        lines = [line.decode().removeprefix("data: ").strip() async for line in response.content if line.strip()]
    return [json.loads(line) if line.startswith("{") else line for line in lines]


def text_of(events: list[dict[str, Any] | str]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


# --------------------------------------------------------------------------------------------- requests
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_a_request_is_answered_alike_streamed_and_whole(client: Client, path: str, body: dict[str, Any]) -> None:
    whole = (await client.post(path, {"model": MODEL, "max_tokens": 20, **body})).body
    events = await streamed(client, path, {"max_tokens": 20, **body})
    (choice,) = whole["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert len(text) == 20
    assert text_of(events) == text
    usage = next(event["usage"] for event in events if isinstance(event, dict) and event.get("usage"))
    assert events[-1] == "[DONE]"
    assert {key: usage[key] for key in ("prompt_tokens", "completion_tokens")} == {
        key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    }
    assert choice["finish_reason"] == "length"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("worker", ["w0", "w1"])
async def test_the_second_of_two_equal_prompts_goes_to_the_holder_which_reuses_what_was_promised(
    client: Client, worker: str
) -> None:
    tokens = prompt(int(worker[1:]))
    first = await client.complete(tokens, x_worker_instance_id=worker)
    assert (first.status, first.worker, first.overlap_blocks, first.cached_tokens) == (200, worker, 0, 0)
    await client.until_index_has(worker)
    second = await client.complete(tokens)
    assert (second.worker, second.overlap_blocks) == (worker, BLOCKS)
    assert second.cached_tokens == BLOCKS * BLOCK_SIZE


@pytest.mark.asyncio(loop_scope="module")
async def test_each_attention_dp_rank_is_routed_to_by_what_it_holds(client: Client) -> None:
    for rank in ("0", "1"):
        tokens = prompt(100 + int(rank))
        await client.complete(tokens, x_worker_instance_id="w1", x_dp_rank=rank)
        await client.until_index_has("w1")
        routed = (await client.post("/v1/route", {"model": MODEL, "prompt": tokens, "max_tokens": 4})).body["decision"]
        chosen = routed["candidates"][routed["winner"]]
        assert (chosen["worker_id"], str(chosen["dp_rank"])) == ("w1", rank)
        assert chosen["overlap_blocks"][0] == BLOCKS


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_is_asked_for_by_its_name_where_it_is_loaded(client: Client) -> None:
    async with client.session.get(f"{client.data_url}/v1/models") as response:
        assert {each["id"] for each in (await response.json())["data"]} == {MODEL, LORA}
    answered = await client.post("/v1/completions", {"model": LORA, "prompt": prompt(200), "max_tokens": 4})
    assert (answered.status, answered.worker) == (200, "w0")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_index_is_what_the_workers_mirrors_hold(fleet: FleetProcesses, client: Client) -> None:
    for seed in range(300, 320):
        assert (await client.complete(prompt(seed))).status == 200
    told = await verified(fleet)
    assert [(each["worker_id"], each["dp_rank"], each["verdict"]) for each in told["ranks"]] == [
        ("w0", 0, "equal"),
        ("w1", 0, "equal"),
        ("w1", 1, "equal"),
    ]
    assert all(each["blocks"]["gpu"] > 0 for each in told["ranks"])


@pytest.mark.asyncio(loop_scope="module")
async def test_every_metric_of_such_a_worker_is_documented(client: Client) -> None:
    shown = await families(client, await client.base_url("w0"))
    assert {"kvrouter_engine_load_seconds", "kvrouter_engine_dead"} <= shown
    assert shown - COMMANDS["worker-agent serve"].keys() == set()


# ------------------------------------------------------------------------------------------------- ends
@pytest.mark.asyncio(loop_scope="module")
async def test_a_dying_engine_fails_its_streams_honestly_and_its_worker_leaves() -> None:
    """Where another worker could go on with them, they would migrate."""
    faults = {"w0": {"die_at_iteration": 100}}
    async with TrtllmFleet({"w0": ()}, faults) as fleet, client_of(fleet) as client:
        asked: dict[str, Any] = {"prompt": prompt(1), "max_tokens": 2000}
        dying = await asyncio.gather(*(streamed(client, "/v1/completions", asked) for _ in range(3)))
        for events in dying:
            errors = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
            assert {error["type"] for error in errors} == {"server_error"}, "each is told that its answer is none"
            assert len(text_of(events)) < asked["max_tokens"]
        assert any(text_of(events) for events in dying), "those that had begun"
        assert await fleet.workers["w0"].until_ended() == 1
        assert "worker-agent: the engine is dead: " in fleet.workers["w0"].output
        await until(lambda: is_gone(client, "w0"))
        answered = await client.complete(prompt(1))
        assert (answered.status, answered.body["error"]["code"]) == (503, "no_worker")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_that_is_asked_to_stop_ends_what_it_began() -> None:
    async with TrtllmFleet({"w0": (), "w1": ()}, {}) as fleet, client_of(fleet) as client:
        asked = {"model": MODEL, "prompt": prompt(1), "max_tokens": 3000, "stream": True}
        headers = {"x-worker-instance-id": "w0"}
        url = f"{client.data_url}/v1/completions"
        async with client.session.post(url, json=asked, headers=headers) as response:
            await response.content.readline()
            await fleet.workers["w0"].end(signal.SIGTERM)
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await fleet.workers["w0"].until_ended() == 0
        await until(lambda: is_gone(client, "w0"))
        assert (await client.complete(prompt(1))).worker == "w1"


async def is_gone(client: Client, worker: str) -> bool:
    known = (await client.control("/v1/workers"))["workers"]
    return all(each["registration"]["worker_id"] != worker for each in known)
