"""`/v1/responses` of an agent, by the `openai` SDK and by their bytes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseStreamEvent

from tests.system.integration.agent_http import CHAT, CREATED, TEXT, Agent, saying
from worker_agent.api.parsers.families import AnswerFormat

RESPONSES = "/v1/responses"
TOOL: FunctionToolParam = {
    "type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False,
}  # fmt: skip
THINKS_SAYS_AND_CALLS = '<think>why</think>I call.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PARSED = AnswerFormat("hermes", "qwen3")


@asynccontextmanager
async def sdk_of(agent: Agent) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{agent.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_whole_response_is_what_the_sdk_reads() -> None:
    async with saying("hello you") as agent, sdk_of(agent) as sdk:
        response = await sdk.responses.create(
            model="m", input="hi", instructions="be kind", metadata={"a": "b"}, max_output_tokens=50, temperature=0.5
        )
    assert (response.output_text, response.status, response.error) == ("hello you", "completed", None)
    assert (response.created_at, response.instructions, response.metadata) == (CREATED, "be kind", {"a": "b"})
    assert (response.temperature, response.max_output_tokens) == (0.5, 50)
    assert response.id.startswith("resp_")
    (item,) = response.output
    assert item.type == "message"
    assert (item.id, item.status) == (f"msg_{response.id.removeprefix('resp_')}0", "completed")
    assert response.usage is not None
    prompt = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert response.usage.input_tokens == len(TEXT.pack_chat(prompt)) // 4
    assert response.usage.output_tokens == len("hello you") + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def streamed(sdk: openai.AsyncOpenAI, **options: Any) -> list[ResponseStreamEvent]:
    stream = await sdk.responses.create(model="m", stream=True, **{"input": "hi"} | options)
    return [event async for event in stream]


async def test_a_stream_has_the_documented_events_in_their_order_and_numbers() -> None:
    async with saying("hello you") as agent, sdk_of(agent) as sdk:
        events = await streamed(sdk)
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello you"
    last = events[-1]
    assert last.type == "response.completed"
    assert (last.response.output_text, last.response.usage is not None) == ("hello you", True)


async def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    async with saying(THINKS_SAYS_AND_CALLS, PARSED) as agent, sdk_of(agent) as sdk:
        whole = await sdk.responses.create(model="m", input="hi", tools=[TOOL], max_output_tokens=200)
        events = await streamed(sdk, tools=[TOOL], max_output_tokens=200)
    last = events[-1]
    assert last.type == "response.completed"
    for response in (whole, last.response):
        reasoning, message, call = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert [part.text for part in reasoning.content] == ["why"]
        assert (message.type, response.output_text) == ("message", "I call.")
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("f", {"a": 1}, "completed")
        assert call.call_id.startswith("call_")
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(event.delta for event in arguments)) == {"a": 1}
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"a": 1}]


async def test_a_response_at_its_limit_is_incomplete() -> None:
    async with saying("hello you") as agent, sdk_of(agent) as sdk:
        whole = await sdk.responses.create(model="m", input="hi", max_output_tokens=5)
        events = await streamed(sdk, max_output_tokens=5)
    last = events[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, response.output_text) == ("incomplete", "hello")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        (item,) = response.output
        assert item.type == "message"
        assert item.status == "incomplete"


async def test_the_prompt_of_a_turn_with_the_answer_before_is_that_of_the_chat() -> None:
    async with saying("hello you") as agent, sdk_of(agent) as sdk:
        asked = {"role": "user", "content": "hi " * 20}
        first = await sdk.responses.create(model="m", input=[{"role": "user", "content": asked["content"]}])
        turns: Any = [asked, *first.output, {"role": "user", "content": "and?"}]
        second = await sdk.responses.create(model="m", input=turns)
        messages = [asked, {"role": "assistant", "content": "hello you"}, {"role": "user", "content": "and?"}]
        chat = await agent.ask(CHAT, {"messages": messages})
    assert second.usage is not None
    assert second.usage.input_tokens == chat.usage["prompt_tokens"]
    assert second.usage.input_tokens_details.cached_tokens >= 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"kv_response": {}}, "kv_response"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_is_not_served_is_refused_by_its_key(fields: dict[str, Any], param: str) -> None:
    async with saying("hi") as agent:
        answered = await agent.ask(RESPONSES, {"input": "hi", **fields})
    assert (answered.status, answered.body["error"]["param"]) == (400, param)
