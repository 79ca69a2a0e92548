"""Tool calls and reasoning of six model families, read by the `openai` SDK through a router and a worker of each."""

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from tests.support.tool_calls import Case, Read, golden_cases
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAMILIES = ("hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v3", "gpt_oss")
TWO_CALLS = {case.family: case for case in golden_cases() if len(case.read.tool_calls) == 2 and case.family in FAMILIES}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather, and the time?"}]

each_family = pytest.mark.parametrize("family", FAMILIES)


async def start_worker(fleet: FleetProcesses, case: Case) -> None:
    """A simulated engine that says the case's text to everything serves the model that is called as the family."""
    worker_id = case.family.replace("_", "-")
    command = [sys.executable, "-m", "worker_agent", "serve", "--worker-id", worker_id, "--nats-url", fleet.nats_url]
    command += ["--served-name", case.family, "--tool-call-parser", case.tool_call_parser]
    command += ["--reasoning-parser", case.reasoning_parser]
    for setting in (*FAST_WORKER, f"engine.answer={json.dumps(case.text)}"):
        command += ["--set", setting]
    worker = ChildProcess(worker_id, command)
    await fleet.add_worker(worker)
    await worker.line_with(f"worker {worker_id} on")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    shape = FleetShape(workers=1, worker_settings=FAST_WORKER, router_settings=QUIET_ROUTER)
    async with FleetProcesses(shape) as fleet:
        for case in TWO_CALLS.values():
            await start_worker(fleet, case)
        await fleet.until_ready()
        base_url = f"{fleet.data_url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            yield client


def asked(family: str) -> dict[str, Any]:
    return {"model": family, "messages": MESSAGES, "max_tokens": 2048, "tools": TWO_CALLS[family].tools}


@each_family
async def test_calls_and_reasoning_of_a_whole_answer_are_read(sdk: openai.AsyncOpenAI, family: str) -> None:
    chat = await sdk.chat.completions.create(**asked(family))
    (choice,) = chat.choices
    calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
    said = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls]
    reasoning = getattr(choice.message, "reasoning_content", None)
    assert Read(choice.message.content, reasoning, said) == TWO_CALLS[family].read
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in calls}) == 2


@each_family
async def test_calls_and_reasoning_of_a_stream_are_read(sdk: openai.AsyncOpenAI, family: str) -> None:
    stream = await sdk.chat.completions.create(**asked(family), stream=True)
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    calls: dict[int, dict[str, str]] = {}
    for call in (call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []):
        assert call.function is not None
        if call.index not in calls:
            assert call.id
            calls[call.index] = {"name": call.function.name or "", "arguments": ""}
        calls[call.index]["arguments"] += call.function.arguments or ""
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    read = Read(content or None, reasoning or None, [calls[index] for index in sorted(calls)])
    assert read == TWO_CALLS[family].read
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]) > 2  # as they came


@each_family
async def test_calls_are_text_where_none_are_wanted(sdk: openai.AsyncOpenAI, family: str) -> None:
    chat = await sdk.chat.completions.create(**asked(family), tool_choice="none")
    assert chat.choices[0].message.tool_calls is None
    assert "get_weather" in (chat.choices[0].message.content or "") or family == "gpt_oss"
    assert chat.choices[0].finish_reason == "stop"


async def test_the_next_turn_takes_the_calls_and_their_results(sdk: openai.AsyncOpenAI) -> None:
    chat = await sdk.chat.completions.create(**asked("hermes"))
    message: Any = chat.choices[0].message.model_dump(exclude_none=True)
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message["tool_calls"]
    ]
    following: Any = asked("hermes") | {"messages": [*MESSAGES, message, *results]}
    answer = await sdk.chat.completions.create(**following)
    assert answer.choices[0].finish_reason == "tool_calls"
