"""What only an engine reads reaches it as the client sent it, and a prompt that only it knows is routed by its text."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.unit.router.plane import CHAT, COMPLETIONS, Plane, running_plane
from tests.unit.router.samples import MODEL
from tests.unit.router.upstream import Upstream, answers

GOOD = answers(200, b'{"choices":[]}')
MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS: dict[str, Any] = {
    "mm_processor_kwargs": {"num_crops": 4},
    "vllm_xargs": {"a": 1},
    "truncate_prompt_tokens": 100,
    "request_id": "r-1",
    "media_io_kwargs": {"video": {"num_frames": 8}},
    "kv_transfer_params": {"lmcache.tag": "a"},
    "return_routed_experts": True,
    "rid": "r-1",
    "separate_reasoning": True,
    "regex": "a+",
    "lora_path": None,
    "stop_regex": None,
    "return_hidden_states": False,
    "custom_params": {"a": 1},
    "extra_key": "tenant",
    "functions": None,
    "function_call": None,
    "web_search_options": None,
    "audio": None,
    "prompt_cache_retention": None,
    "chat_template": "{{ messages }}",
    "add_special_tokens": True,
    "max_tokens": "many",
    "temperature": -7,
    "stream_options": {"include_reasoning": True},
    "response_format": {"type": "grammar", "grammar": "root ::= x"},
    "nvext": {"another": {"a": 1}},
    "tools": [{"type": "mcp", "server_label": "s"}],
}


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[Plane]:
    async with running_plane() as running:
        yield running


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("option", OPTIONS)
async def test_every_option_reaches_the_engine_byte_for_byte(plane: Plane, option: str, engine: str) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, option: OPTIONS[option], "unknown": [1.50, None]}
    sent = json.dumps(fields, indent=1).encode()
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, event_source=engine, accepts_token_ids=False)
        answered = await plane.post(sent, CHAT)
    assert answered.status == 200
    assert [each.body for each in worker.received] == [sent]


def unrendered(text: str) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "boss", "content": text}]}).encode()


async def test_a_prompt_that_is_not_rendered_goes_where_its_text_went_before() -> None:
    async with running_plane() as plane, Upstream(GOOD) as worker:
        for number in range(3):
            plane.join(f"w{number}", worker.base_url)
        said = {text: [await plane.post(unrendered(text * 300), CHAT) for _ in range(3)] for text in ("a", "b", "c")}
    for answers_ in said.values():
        assert {each.headers["x-kv-unrendered"] for each in answers_} == {"messages[0].role"}
        assert len({each.headers["x-worker-instance-id"] for each in answers_}) == 1
        assert int(answers_[-1].headers["x-overlap-blocks"]) > 0
    assert plane.prompts.unrendered["messages"] == 9


async def test_the_estimated_length_of_a_prompt_that_is_not_rendered_excludes_no_worker(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, max_seq_len=64)
        assert (await plane.post(unrendered("a" * 10_000), CHAT)).status == 200
        assert (await plane.post({"prompt": "a" * 10_000}, COMPLETIONS)).error["code"] == "context_length_exceeded"


async def test_what_was_reused_of_a_prompt_that_is_not_rendered_says_nothing_of_predictions() -> None:
    usage = b'{"usage":{"prompt_tokens":50,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}'
    async with running_plane() as plane, Upstream(answers(200, usage)) as worker:
        plane.join("w0", worker.base_url)
        for _ in range(3):
            await plane.post(unrendered("a" * 1000), CHAT)
        assert plane.metric("prediction_error_tokens_count", worker="w0") == 0
        await plane.post({"prompt": "a" * 1000}, COMPLETIONS)
        assert plane.metric("prediction_error_tokens_count", worker="w0") == 1
