"""A prefill and a decode agent with simulated engines: what one answers is the other's request, all over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kv_runtime.clock import SystemClock
from tests.system.integration.agent_http import CHAT, COMPLETIONS, HELLO, Agent, serving
from tests.system.integration.broker import eventually
from worker_agent.engine_args.rules import Role
from worker_agent.engines.simulated.config import KvTransferSection
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.http_carrier import HttpCarrier
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import TransferStatistics
from worker_agent.engines.types import EngineDescription

ENGINE = EngineDescription(
    model="m",
    version="1",
    event_source="simulated",
    block_size=4,
    total_kv_blocks=2048,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_seq_len=4096,
)
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 20}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 20}),
]


class Worker:
    """An agent, and the engine behind it."""

    def __init__(self, agent: Agent, engine: SimulatedEngine) -> None:
        self.agent, self.engine = agent, engine

    def statistics(self) -> TransferStatistics:
        return self.engine.transfer_statistics()


@asynccontextmanager
async def worker(role: Role, **transfer: Any) -> AsyncIterator[Worker]:
    section = KvTransferSection(**({"timeout_s": 3000.0} | transfer))
    simulator = Simulator(ENGINE, role=role, transfers=section.rules)
    engine = SimulatedEngine(simulator, SystemClock(), speed=100.0, carrier=HttpCarrier(section))
    async with serving(engine, role=role) as agent:
        yield Worker(agent, engine)


def params(kind: str, **more: Any) -> dict[str, Any]:
    return {"disaggregated_params": {"request_type": kind, **more}}


def shown(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "asked"), CASES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_two_agents_answer_what_one_would_have(path: str, asked: dict[str, Any], streamed: bool) -> None:
    async with worker("aggregated") as one, worker("prefill") as prefill, worker("decode") as decode:
        whole = (await one.agent.ask(path, asked)).body["choices"][0]
        first = await prefill.agent.ask(path, asked | params("context_only", disagg_request_id=5))
        (choice,) = first.body["choices"]
        assert (first.status, choice["finish_reason"], shown(choice)) == (200, "length", shown(whole)[:1])
        handed = choice["disaggregated_params"] | {"request_type": "generation_only"}
        rest = await decode.agent.ask(path, asked | {"disaggregated_params": handed, "stream": streamed})
        assert rest.status == 200, rest.data
        assert (rest.shown if streamed else shown(rest.body["choices"][0])) == shown(whole)
        assert (prefill.statistics().handed_over_total, decode.statistics().fetches_total["done"]) == (1, 1)


@pytest.mark.asyncio
async def test_a_decode_agent_says_when_the_kv_does_not_come_and_serves_on() -> None:
    path, asked = CASES[1]
    async with worker("decode") as decode:
        async with worker("prefill", timeout_s=1.0) as prefill:
            first = await prefill.agent.ask(path, asked | params("context_only"))
            await eventually(lambda: prefill.statistics().expired_total == 1)
            handed = first.body["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
            failed = await decode.agent.ask(path, asked | {"disaggregated_params": handed})
        assert (failed.status, failed.body["error"]["code"]) == (500, "request_failed")
        assert "KV" in failed.body["error"]["message"]
        assert decode.statistics().fetches_total["gone"] == 1
        assert (await decode.agent.ask(path, asked | params("context_and_generation"))).status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize(("role", "kind"), [("prefill", "generation_only"), ("decode", "context_only")])
async def test_an_agent_refuses_the_other_s_phase(role: Role, kind: str) -> None:
    path, asked = CASES[1]
    async with worker(role) as running:
        refused = await running.agent.ask(path, asked | params(kind))
        assert (refused.status, refused.body["error"]["type"]) == (400, "invalid_request_error")
        assert refused.body["error"]["param"].startswith("disaggregated_params")


@pytest.mark.asyncio
async def test_choices_and_log_probabilities_are_told_as_asked() -> None:
    path, asked = CASES[1]
    async with worker("aggregated") as one:
        told = (await one.agent.ask(path, asked | {"n": 2, "logprobs": 2})).body["choices"]
    assert [choice["index"] for choice in told] == [0, 1]
    assert told[0]["text"] != told[1]["text"]
    for choice in told:
        assert len(choice["logprobs"]["token_logprobs"]) == 20
        assert all(-1 < each < 0 for each in choice["logprobs"]["token_logprobs"])
