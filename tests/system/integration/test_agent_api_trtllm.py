"""The agent's HTTP over TensorRT-LLM's fake: what a client may wish, what it gets, and what each role does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from structlog.testing import capture_logs

from kv_protocol.fleet import Role
from kv_runtime.text.byte_model import ByteText
from tests.contract.engines import trtllm_engine
from tests.support.trtllm import Fake, trtllm
from tests.system.integration.agent_http import CHAT, COMPLETIONS, HELLO, Agent, Answered, serving
from tests.system.integration.broker import eventually
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.settings import LoraAdapter, TrtllmSettings

__all__ = ["trtllm"]

TRANSFER = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 8192}}
LETTERS, BYTES = 128, 263
"""Sizes of vocabularies: ASCII alone; all tokens of the byte model, of which text is full of half characters."""
ASKED = {"prompt": "hello", "max_tokens": 12}
GUIDED = {"guided_decoding_backend": "xgrammar"}


@asynccontextmanager
async def agent(
    fake: Fake,
    *,
    role: Role = "aggregated",
    vocabulary: int = LETTERS,
    settings: TrtllmSettings | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Agent, TensorRTLLMEngine]]:
    fake.control.model = replace(fake.control.model, vocab_size=vocabulary)
    transfers = {} if role == "aggregated" else TRANSFER
    settings = settings or TrtllmSettings(watch_s=0.01, transfer_s=0.1)
    engine = trtllm_engine(transfers | (arguments or {}), settings, role=role)
    async with serving(engine, role=role, **options) as running:
        yield running, engine


async def both(running: Agent, path: str, asked: dict[str, Any]) -> tuple[Answered, Answered]:
    """Return the whole answer, and the streamed one, of the same request."""
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    whole, stream = await running.ask(path, asked), await running.ask(path, streamed)
    assert (whole.status, stream.status) == (200, 200), (whole.data, stream.data)
    return whole, stream


# --------------------------------------------------------------------------------------------- answers
@pytest.mark.asyncio
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("vocabulary", [LETTERS, BYTES])
async def test_choices_with_log_probabilities_are_the_same_streamed_and_whole(
    trtllm: Fake, path: str, vocabulary: int
) -> None:
    wishes = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    asked: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    asked |= {"max_tokens": 30, "n": 3, "temperature": 0.7, "seed": 5, **wishes}
    async with agent(trtllm, vocabulary=vocabulary) as (running, _):
        whole, stream = await both(running, path, asked)
    said = [whole.said(choice) for choice in range(3)]
    assert [each["index"] for each in said] == [0, 1, 2]
    for choice, each in enumerate(said):
        streamed = stream.said(choice)
        assert (streamed["text"], streamed["finish_reason"]) == (each["text"], "length")
        assert streamed["logprobs"] == each["logprobs"]
    assert len({each["text"] for each in said}) == 3
    assert stream.usage | {"prompt_tokens_details": 0} == whole.usage | {"prompt_tokens_details": 0}
    assert whole.usage["completion_tokens"] == 90


@pytest.mark.asyncio
async def test_a_chat_s_log_probabilities_spell_its_text(trtllm: Fake) -> None:
    asked = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}
    async with agent(trtllm) as (running, _):
        said = (await running.ask(CHAT, asked)).said()
    content = said["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == said["text"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == said["text"]
    assert [len(each["top_logprobs"]) for each in content] == [3] * 9
    assert all(each["logprob"] <= 0 for each in content)


@pytest.mark.asyncio
async def test_a_completion_s_columns_say_where_each_token_stands(trtllm: Fake) -> None:
    async with agent(trtllm) as (running, _):
        said = (await running.ask(COMPLETIONS, {**ASKED, "logprobs": 0})).said()
    columns = said["logprobs"]
    assert "".join(columns["tokens"]) == said["text"]
    assert columns["text_offset"] == list(range(12))
    assert [list(each) for each in columns["top_logprobs"]] == [[token] for token in columns["tokens"]]
    assert [each[token] for each, token in zip(columns["top_logprobs"], columns["tokens"], strict=True)] == columns[
        "token_logprobs"
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_takes_the_log_probabilities_of_its_tokens_with_it(trtllm: Fake, streamed: bool) -> None:
    async with agent(trtllm) as (running, _):
        text = (await running.ask(COMPLETIONS, {**ASKED, "max_tokens": 40})).said()["text"]
        stop = text[20:23]
        asked = {**ASKED, "max_tokens": 40, "stop": stop, "logprobs": 1, "stream": streamed}
        answered = await running.ask(COMPLETIONS, {**asked, "stream_options": {"include_usage": True}})
        await eventually(lambda: running.api.running == 0)
    cut = text[: text.index(stop)]
    said = answered.said()
    assert (said["text"], said["finish_reason"]) == (cut, "stop")
    assert "".join(said["logprobs"]["tokens"]) == cut
    assert answered.usage["completion_tokens"] == len(cut) + len(stop)


@pytest.mark.asyncio
async def test_each_choice_stops_at_its_own_stop_string_and_the_request_with_the_last(trtllm: Fake) -> None:
    asked = {**ASKED, "n": 2, "temperature": 0.7, "seed": 1}
    async with agent(trtllm) as (running, _):
        free = await running.ask(COMPLETIONS, asked)
        one, other = free.said(0)["text"], free.said(1)["text"]
        stop = next(one[at : at + 3] for at in range(9) if one[at : at + 3] not in other)
        for answered in await both(running, COMPLETIONS, {**asked, "stop": stop}):
            assert [answered.said(choice)["finish_reason"] for choice in (0, 1)] == ["stop", "length"]
            assert (answered.said(0)["text"], answered.said(1)["text"]) == (one[: one.index(stop)], other)
            assert answered.usage["completion_tokens"] == one.index(stop) + 3 + 12


@pytest.mark.asyncio
async def test_the_prompt_s_log_probabilities_stand_in_whole_answers(trtllm: Fake) -> None:
    async with agent(trtllm) as (running, _):
        completion = await running.ask(COMPLETIONS, {**ASKED, "prompt_logprobs": 1})
        chat = await running.ask(CHAT, {"messages": HELLO, "prompt_logprobs": 1, "max_tokens": 1})
        stream = await running.ask(COMPLETIONS, {**ASKED, "prompt_logprobs": 1, "stream": True})
    places = completion.body["choices"][0]["prompt_logprobs"]
    assert [None if each is None else list(each) for each in places] == [None, *([str(each)] for each in b"ello")]
    assert len(chat.body["prompt_logprobs"]) == chat.usage["prompt_tokens"]
    assert (stream.status, stream.body["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.asyncio
async def test_the_second_of_two_equal_prompts_says_what_it_reused(trtllm: Fake) -> None:
    asked: dict[str, Any] = {"prompt": "a prompt of some length", "max_tokens": 4}
    async with agent(trtllm) as (running, _):
        await running.ask(COMPLETIONS, asked)
        for answered in await both(running, COMPLETIONS, asked):
            assert answered.usage["prompt_tokens_details"]["cached_tokens"] == len(asked["prompt"]) - 1


# --------------------------------------------------------------------------------------------- wishes
@pytest.mark.asyncio
async def test_the_model_s_end_token_stops_and_has_no_text(trtllm: Fake) -> None:
    trtllm.control.model = replace(trtllm.control.model, eos_after_tokens=5)
    settings = TrtllmSettings(end_ids=tuple(ByteText.eos_ids), watch_s=0.01)
    async with agent(trtllm, settings=settings) as (running, _):
        for answered in await both(running, COMPLETIONS, {**ASKED, "logprobs": 0}):
            said = answered.said()
            assert (said["finish_reason"], len(said["text"]), answered.usage["completion_tokens"]) == ("stop", 5, 6)
            assert said["logprobs"]["tokens"] == [*said["text"], "<|end|>"]


@pytest.mark.asyncio
async def test_a_client_s_own_stop_token_is_the_last_of_the_text(trtllm: Fake) -> None:
    async with agent(trtllm) as (running, _):
        text = (await running.ask(COMPLETIONS, ASKED)).said()["text"]
        asked = {**ASKED, "ignore_eos": True, "stop_token_ids": [ord(text[3])]}
        stopped = (await running.ask(COMPLETIONS, asked)).said()
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", text[: text.index(text[3]) + 1])


@pytest.mark.asyncio
async def test_what_the_engine_was_not_loaded_with_is_a_400_by_name(trtllm: Fake) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "guided_decoding"),
        ({"logits_processors": ["ban"]}, "logits_processors"),
        ({"n": 2, "best_of": 3, "temperature": 0.5}, "best_of"),
        ({"model": "law"}, "model"),
        ({"echo": True}, "echo"),
    ]
    async with agent(trtllm) as (running, _):
        for wish, field in cases:
            for streamed in (False, True):
                answered = await running.ask(COMPLETIONS, {**ASKED, **wish, "stream": streamed})
                assert (answered.status, answered.body["error"]["param"]) == (404 if field == "model" else 400, field)
        assert running.api.requests_total == {"ok": 0, "refused": 10, "failed": 0, "cancelled": 0}


@pytest.mark.asyncio
async def test_guides_processors_and_adapters_that_it_was_loaded_with_serve(trtllm: Fake, tmp_path: Any) -> None:
    settings = TrtllmSettings(
        loras={"law": LoraAdapter(number=7, path=str(tmp_path))},
        logits_processors={"seven": "tests.unit.worker_agent.logits_processors:only_seven"},
        watch_s=0.01,
    )
    arguments = {"enable_lora": True, **GUIDED}
    async with agent(trtllm, settings=settings, arguments=arguments, loras=("law",)) as (running, _):
        wishes: list[dict[str, Any]] = [
            {"model": "law"},
            {"logits_processors": ["seven"]},
            {"guided_regex": "[a-z]+"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        ]
        for wish in wishes:
            answered = await running.ask(COMPLETIONS, {**ASKED, **wish})
            assert (answered.status, answered.body["model"]) == (200, wish.get("model", "m")), answered.data
        assert [model["id"] for model in (await running.get("/v1/models"))[1]["data"]] == ["m", "law"]


# --------------------------------------------------------------------------------------------- roles
@pytest.mark.asyncio
async def test_a_prefill_worker_s_handoff_has_the_keys_of_the_engine_s_own_server_and_no_others(trtllm: Fake) -> None:
    told = {"request_type": "context_only", "disagg_request_id": 77}
    async with agent(trtllm, role="prefill") as (prefill, _):
        params = (await prefill.ask(COMPLETIONS, {**ASKED, "logprobs": 1, "disaggregated_params": told})).said()[
            "disaggregated_params"
        ]
    assert set(params) <= SERVER_KEYS
    assert (params["request_type"], params["ctx_request_id"], params["disagg_request_id"]) == ("context_only", 77, 77)
    assert [set(each) for place in params["first_gen_log_probs"] for each in place] == [{"token_id", "logprob", "rank"}]


SERVER_KEYS = {
    "request_type", "first_gen_tokens", "first_gen_log_probs", "first_gen_logits", "ctx_request_id",
    "encoded_opaque_state", "draft_tokens", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style",
    "ctx_usage",
}  # fmt: skip
"""Of `DisaggregatedParams`, which refuses others. Source: `tensorrt_llm/serve/openai_protocol.py`."""


@pytest.mark.asyncio
async def test_what_an_own_server_of_the_engine_says_is_taken_with_all_its_nulls(trtllm: Fake) -> None:
    async with agent(trtllm, role="prefill") as (prefill, _), agent(trtllm, role="decode") as (decode, _):
        params = (await prefill.ask(COMPLETIONS, ASKED)).said()["disaggregated_params"]
        padded = dict.fromkeys(SERVER_KEYS) | {"return_prompt_token_ids_b64": False, "resolved_thinking": None} | params
        answered = await decode.ask(COMPLETIONS, {**ASKED, "disaggregated_params": padded})
    assert (answered.status, answered.usage["completion_tokens"]) == (200, 12)


# --------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_fails_after_it_began_fails_alone(trtllm: Fake, streamed: bool) -> None:
    trtllm.control.hold()
    async with agent(trtllm) as (running, engine), asyncio.TaskGroup() as group:
        asking = group.create_task(running.ask(COMPLETIONS, {**ASKED, "stream": streamed}))
        await eventually(lambda: len(trtllm.control.results) == 1)
        (result,) = trtllm.control.results
        trtllm.control.allow(1)
        await eventually(lambda: result.outputs[0].token_ids)
        result.queue.put(trtllm.llmapi.RequestError("lost its blocks"))
        answered = await asking
        assert engine.fault is None
        assert running.api.requests_total == {"ok": 0, "refused": 0, "failed": 1, "cancelled": 0}
        trtllm.control.release()
        assert (await running.ask(COMPLETIONS, ASKED)).status == 200
    error = (answered.events[-1] if streamed else answered.body)["error"]
    assert (answered.status, error["code"]) == (200 if streamed else 500, "request_failed")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("role", "wishes"), [("aggregated", {"n": 4, "temperature": 0.5}), ("prefill", {}), ("aggregated", {"logprobs": 1})]
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_leaves_no_request_in_the_engine(
    trtllm: Fake, role: Role, wishes: dict[str, Any], streamed: bool
) -> None:
    trtllm.control.hold()
    async with agent(trtllm, role=role) as (running, engine):
        _, writer = await running.open(COMPLETIONS, {**ASKED, **wishes, "stream": streamed})
        await eventually(lambda: len(trtllm.control.results) == 1)
        (result,) = trtllm.control.results
        writer.transport.abort()
        await eventually(lambda: running.api.requests_total["cancelled"] == 1)
        trtllm.control.release()
        await eventually(lambda: result.finished or result.aborted())
        assert running.api.running == 0
        async with asyncio.timeout(10):
            await engine.stop(3600.0)  # it waits for requests that are not over


@pytest.mark.asyncio
async def test_a_dead_engine_s_worker_is_not_healthy(trtllm: Fake) -> None:
    reasons: list[str | None] = [None]
    async with agent(trtllm, fault=lambda: reasons[0]) as (running, _):
        assert (await running.get("/health"))[0] == 200
        reasons[0] = "RuntimeError: Xid 79"
        for path in ("/health", "/live"):
            assert await running.get(path) == (503, {"status": "failed", "reason": "RuntimeError: Xid 79"})


@pytest.mark.asyncio
async def test_the_trace_and_the_conversation_reach_the_engine(trtllm: Fake) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    async with agent(trtllm, settings=TrtllmSettings(conversation_affinity=True, watch_s=0.01)) as (running, _):
        for session in ("talk 7", "x" * 129):
            assert (await running.ask(COMPLETIONS, ASKED, x_session_id=session, **trace)).status == 200
    assert trtllm.control.heard == [(trace, "talk 7"), (trace, None)]


@pytest.mark.asyncio
async def test_the_vendor_s_own_client_reads_every_answer(trtllm: Fake) -> None:
    wishes = {"max_tokens": 6, "n": 2, "temperature": 0.7}
    async with agent(trtllm) as (running, _):
        chats = await both(running, CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **wishes})
        completions = await both(running, COMPLETIONS, {"prompt": "hello", "logprobs": 2, **wishes})
    chat = ChatCompletion.model_validate(chats[0].body, strict=True)
    completion = Completion.model_validate(completions[0].body, strict=True)
    assert chat.choices[1].logprobs is not None
    assert [len(place.top_logprobs) for place in chat.choices[1].logprobs.content or ()] == [2] * 6
    assert completion.choices[1].logprobs is not None
    assert completion.choices[1].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    for event in chats[1].events[:-1]:
        ChatCompletionChunk.model_validate(event, strict=True)
    for event in completions[1].events[:-1]:
        if all(choice["finish_reason"] for choice in event["choices"]):  # its type wants a reason in every chunk
            Completion.model_validate(event, strict=True)


# ------------------------------------------------------------------------------------- another version
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [("llmapi.llm", "BaseLLM", "generate_async"), ("executor.result", "GenerationResult", "outputs")],
)
async def test_a_name_that_the_library_lacks_is_a_500_that_names_it(
    trtllm: Fake, monkeypatch: pytest.MonkeyPatch, module: str, kind: str, name: str
) -> None:
    async with agent(trtllm) as (running, engine):
        monkeypatch.delattr(getattr(trtllm.submodule(module), kind), name)
        with capture_logs() as lines:
            answers = [await running.ask(COMPLETIONS, ASKED) for _ in range(2)]
        monkeypatch.undo()
        assert (await running.ask(COMPLETIONS, ASKED)).status == 200
        assert (engine.fault, engine.failed_requests_total) == (None, 2)
    assert [answer.status for answer in answers] == [500, 500]
    version = trtllm.module.__version__
    for answer in answers:
        message = answer.body["error"]["message"]
        assert message.startswith(f"tensorrt_llm {version} does not have what the agent asks for: AttributeError: ")
        assert message.endswith(f"has no attribute '{name}'")
    told = [line for line in lines if line["event"] == "library_mismatch"]
    assert [(line["log_level"], line["version"]) for line in told] == [("error", version)]
    assert name in told[0]["reason"]
