"""The `openai` SDK, as its users use it, through router and worker."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from bench.processes import FleetProcesses
from tests.system.e2e.client import MODEL

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are terse. " * 20},
    {"role": "user", "content": "Why is the sky blue?"},
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sdk(fleet: FleetProcesses) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet.data_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unstreamed_chat_completes_with_usage(sdk: openai.AsyncOpenAI) -> None:
    chat = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert chat.choices[0].message.role == "assistant"
    assert len(chat.choices[0].message.content or "") == 12
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_streamed_chat_gives_the_same_text_and_ends_with_usage(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30)
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unknown_model_is_the_sdks_not_found_error(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="allowed sim-8b"):
        await sdk.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
