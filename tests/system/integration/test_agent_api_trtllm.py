"""The agent's HTTP over TensorRT-LLM's fake: what a client may wish, what it gets, and what each role does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.samples import Sample
from structlog.testing import capture_logs

from tests.contract.engines import trtllm_engine
from tests.support.trtllm import Fake
from tests.system.integration.agent_http import CHAT, COMPLETIONS, HELLO, Agent, Answered, serving
from tests.system.integration.broker import eventually
from worker_agent.engines.trtllm.calls import OwnMetrics
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.settings import TrtllmSettings

LETTERS = 128
"""A vocabulary of ASCII alone."""
ASKED = {"prompt": "hello", "max_tokens": 12}


@asynccontextmanager
async def agent(
    fake: Fake,
    *,
    settings: TrtllmSettings | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Agent, TensorRTLLMEngine]]:
    fake.control.model = replace(fake.control.model, vocab_size=LETTERS)
    settings = settings or TrtllmSettings(watch_s=0.01, transfer_s=0.1)
    engine = trtllm_engine(arguments or {}, settings)
    async with serving(engine, **options) as running:
        yield running, engine


async def both(running: Agent, path: str, asked: dict[str, Any]) -> tuple[Answered, Answered]:
    """Return the whole answer, and the streamed one, of the same request."""
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    whole, stream = await running.ask(path, asked), await running.ask(path, streamed)
    assert (whole.status, stream.status) == (200, 200), (whole.data, stream.data)
    return whole, stream


# --------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_fails_after_it_began_fails_alone(trtllm: Fake, streamed: bool) -> None:
    trtllm.control.hold()
    async with agent(trtllm) as (running, engine), asyncio.TaskGroup() as group:
        asking = group.create_task(running.ask(COMPLETIONS, {**ASKED, "stream": streamed}))
        await eventually(lambda: len(trtllm.control.results) == 1)
        (result,) = trtllm.control.results
        trtllm.control.allow(1)
        await eventually(lambda: result.outputs[0].token_ids)
        result.put(trtllm.llmapi.RequestError("lost its blocks"))
        answered = await asking
        assert engine.fault is None
        assert running.api.in_flight.requests_total == {"ok": 0, "refused": 0, "failed": 1, "cancelled": 0}
        trtllm.control.release()
        assert (await running.ask(COMPLETIONS, ASKED)).status == 200
    error = (answered.events[-1] if streamed else answered.body)["error"]
    assert (answered.status, error["code"]) == (200 if streamed else 500, "request_failed")


async def test_a_dead_engine_s_worker_is_not_healthy(trtllm: Fake) -> None:
    reasons: list[str | None] = [None]
    async with agent(trtllm, fault=lambda: reasons[0]) as (running, _):
        assert (await running.get("/health"))[0] == 200
        reasons[0] = "RuntimeError: Xid 79"
        for path in ("/health", "/live"):
            assert await running.get(path) == (503, {"status": "failed", "reason": "RuntimeError: Xid 79"})


async def test_the_trace_and_the_conversation_reach_the_engine(trtllm: Fake) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    async with agent(trtllm, settings=TrtllmSettings(conversation_affinity=True, watch_s=0.01)) as (running, _):
        for session in ("talk 7", "x" * 129):
            assert (await running.ask(COMPLETIONS, ASKED, x_session_id=session, **trace)).status == 200
    assert trtllm.control.heard == [(trace, "talk 7"), (trace, None)]


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
        assert message.startswith(f"tensorrt_llm {version} lacks what the agent asks for: AttributeError: ")
        assert message.endswith(f"has no attribute '{name}'")
    told = [line for line in lines if line["event"] == "library_mismatch"]
    assert [(line["log_level"], line["version"]) for line in told] == [("error", version)]
    assert name in told[0]["reason"]


# --------------------------------------------------------------------------------------------- the engine's own metrics
@pytest.mark.parametrize("version", ["1.3.0rc29", "1.4.0rc1"])
async def test_the_engine_counts_its_requests_and_iterations(trtllm: Fake, version: str) -> None:
    trtllm.control.version = version
    arguments = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    async with agent(trtllm, arguments=arguments) as (running, engine):
        await running.ask(COMPLETIONS, ASKED)
        await running.ask(COMPLETIONS, {**ASKED, "n": 2, "temperature": 0.7})
        engine.iteration_stats(0.0)
        assert engine.own_metrics is not None
        shown = {(each.name, each.labels.get("finished_reason")): each for each in samples(engine.own_metrics)}
    assert shown["trtllm_request_success_total", "length"].value == 2
    assert shown["trtllm_request_success_total", "length"].labels["model_name"] == "m"
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert shown[f"trtllm_{name}_seconds_count", None].value == 2
    assert ("trtllm_num_requests_running", None) in shown


async def test_what_the_engine_cannot_count_fails_no_request(trtllm: Fake) -> None:
    async with agent(trtllm, arguments={"return_perf_metrics": True}) as (running, engine):
        assert engine.own_metrics is not None
        with capture_logs() as logs:
            engine.own_metrics.iterated({})
            engine.own_metrics.iterated({})
        assert (await running.ask(COMPLETIONS, ASKED)).status == 200
    assert [each["event"] for each in logs] == ["engine_metrics_lost"]


def samples(metrics: OwnMetrics) -> list[Sample]:
    return [sample for family in metrics.families() for sample in family.samples]
