"""Tool calls and reasoning in an agent's answers, over HTTP: what clients get, counts, and what requests may say."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from kv_protocol.continuation import progress_of
from kv_runtime.clock import Clock
from tests.support.structural_tags import accepts
from tests.support.tool_calls import Case, Read, golden_cases
from tests.system.integration.agent_http import CHAT, HELLO, SIMULATED, TEXT, Agent, Answered, saying, serving
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.tokens import ScriptedSource
from worker_agent.port.sampling import Guide
from worker_agent.port.types import EngineOutput, EngineRequest

HERMES = AnswerFormat("hermes", "qwen3")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<think>why</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TWO = CALL + '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
F, G = {"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}
SAID = [case for case in golden_cases() if not case.prompt_end and not (case.family == "gpt_oss" and case.is_open)]
"""The byte tokenizer's prompts begin no reasoning, and its end token is <|end|>, which closes harmony's messages."""


async def told(agent: Agent, **body: Any) -> Answered:
    return await agent.ask(CHAT, {"messages": HELLO, "max_tokens": 2048, "tools": TOOLS, **body})


def read_whole(answered: Answered) -> Read:
    message = answered.body["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return Read(message["content"] or None, message.get("reasoning_content"), calls)


def read_stream(answered: Answered) -> Read:
    choices = [event["choices"][0] for event in answered.events if event != "[DONE]"]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
        function = call["function"]
        if call["index"] not in calls:
            assert call["type"] == "function"
            assert call["id"]
            calls[call["index"]] = {"name": function["name"], "arguments": ""}
        else:
            assert set(call) == {"index", "function"}
        calls[call["index"]]["arguments"] += function["arguments"]
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return Read(content or None, reasoning or None, [calls[index] for index in sorted(calls)])


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case.family}: {case.name}")
async def test_golden_answers_are_read_streamed_and_whole(case: Case) -> None:
    async with saying(case.text, AnswerFormat(case.tool_call_parser, case.reasoning_parser)) as agent:
        whole = await told(agent, tools=case.tools)
        stream = await told(agent, tools=case.tools, stream=True)
        assert read_whole(whole) == case.read
        assert read_stream(stream) == case.read
        assert whole.body["choices"][0]["finish_reason"] == stream.said()["finish_reason"] == case.finish_reason
        assert agent.api.completions.tool_calls_total["unclosed"] == 2 * case.is_open


async def test_an_answer_that_is_too_long_says_so_and_its_call_is_counted() -> None:
    async with saying(CALL, HERMES) as agent:
        answered = await told(agent, max_tokens=len(CALL) - len("}}</tool_call>"), stream=True)
        assert read_stream(answered).tool_calls == [{"name": "f", "arguments": '{"a": 1'}]
        assert answered.said()["finish_reason"] == "length"
        assert agent.api.completions.tool_calls_total == {"complete": 0, "unclosed": 1}


class Guided(SimulatedEngine):
    """An engine that takes structural tags, and keeps the guides of its requests."""

    guides: list[Guide | None]

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self.guides = [*getattr(self, "guides", ()), request.sampling.guide]
        unguided = msgspec.structs.replace(request.sampling, guide=None)
        return super().generate(msgspec.structs.replace(request, sampling=unguided))


async def test_a_demanded_call_guides_the_engine() -> None:
    described = msgspec.structs.replace(SIMULATED, takes_structural_tags=True)
    source = ScriptedSource(
        script=(*TEXT.encode("<think>\n</think>" + CALL.removeprefix("<think>why</think>")), *TEXT.eos_ids)
    )
    engine = Guided(Simulator(described, token_source=source), Clock(), speed=1000.0)
    two, named = (
        [*TOOLS, {"type": "function", "function": {"name": "g"}}],
        {"type": "function", "function": {"name": "g"}},
    )
    async with serving(engine, answer_format=HERMES) as agent:
        for choice in (None, "auto", "none", "required", named):
            body = {} if choice is None else {"tool_choice": choice}
            assert (await told(agent, tools=two, **body)).status == 200
        await told(agent, tools=two, tool_choice="required", parallel_tool_calls=False)
    *free, required, of_g, one = engine.guides
    assert free == [None, None, None]
    f, g = (f'\n{{"name": "{name}", "arguments": {{}}}}\n'.join(("<tool_call>", "</tool_call>")) for name in "fg")
    answers = (f, g, f"{f}\n{g}", f"<think>\n</think>\n{g}", "no")
    tags = [msgspec.json.decode(guide.value) for guide in (required, of_g, one) if guide]
    taken = [[accepts(tag, answer) for answer in answers] for tag in tags]
    assert taken == [
        [True, True, True, True, False],
        [False, True, False, True, False],
        [True, True, False, True, False],
    ]


async def test_a_stream_goes_on_at_another_worker_behind_any_event_of_its_calls() -> None:
    body = {"messages": HELLO, "max_tokens": 2048, "tools": TOOLS, "stream": True}
    async with saying(TWO, HERMES) as agent:
        whole = await agent.ask(CHAT, body, x_kv_continuable="1")
        events = [event + b"\n\n" for event in whole.data.split(b"\n\n") if event]
        gone_on = 0
        for cut in range(1, len(events)):
            progress = progress_of(b"".join(events[:cut]))
            if progress is None or progress.finish_reason is not None:
                continue
            rest = await agent.ask(CHAT, {**body, "kv_continue": json.loads(progress.continuation())})
            both = b"".join(events[:cut]) + rest.data
            data = b"".join(line + b"\n\n" for line in both.split(b"\n") if line.startswith(b"data: "))
            joined = Answered(200, whole.headers, data)
            assert read_stream(joined) == Read(None, "why", [F, G]), cut
            assert joined.said()["finish_reason"] == "tool_calls"
            gone_on += 1
    assert gone_on > len("why") + len(F["arguments"]) + len(G["arguments"])
