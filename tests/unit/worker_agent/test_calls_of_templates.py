"""Calls that the templates of real models write into a chat are read as the calls that they were, cut anywhere."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_runtime.text.chat_template import ChatTemplate
from tests.support.paths import CHAT_TEMPLATES
from tests.support.tool_calls import parsed, read_of
from worker_agent.api.parsers.calls import AnswerOptions
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.api.parsers.tag_calls import DeepSeekV32Parser, Glm46Parser, Qwen3CoderParser

SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
FAMILIES = {
    "moonshotai-Kimi-K2": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "GLM-4.7-Flash": "glm46",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "google-gemma-4-31B-it": "gemma4",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen-Qwen3-0.6B": "hermes",
}
ASKED: dict[str, Any] = {"role": "user", "content": "hi"}
TYPES = {"s": "string", "i": "integer", "n": "number", "b": "boolean", "l": "array", "o": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in ("get_weather", "get")
]
ENDS = (
    *Qwen3CoderParser.value_ends,
    *Glm46Parser.value_ends,
    *DeepSeekV32Parser.value_ends,
    '<|"|>',
    "<|tool_call_end|>",
)
"""What a value cannot have within: its family ends it there."""
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from(['a "b"\n\\c', "\n", " x ", "{[,:]}", "<b>é</b>", "</parameter", "<|tool", "🙂"])
).filter(lambda text: not any(end in text for end in ENDS))
WHOLE = st.integers(-(10**9), 10**9)
NUMBERS = WHOLE | st.floats(-1e9, 1e9)
NESTED = st.recursive(
    st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": TEXTS.filter(lambda text: text.lower() != "null"),
        "i": WHOLE,
        "n": NUMBERS,
        "b": st.booleans(),
        "l": st.lists(NESTED, max_size=3),
        "o": st.dictionaries(st.sampled_from(["a", "b_c"]), NESTED, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "get"]), ARGUMENTS), min_size=1, max_size=3)

pytestmark = pytest.mark.skipif(not CHAT_TEMPLATES.is_dir(), reason=f"{CHAT_TEMPLATES} is absent")


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate({"default": (CHAT_TEMPLATES / f"{name}.jinja").read_text()}, SPECIAL)


@pytest.mark.parametrize("name", FAMILIES)
@given(calls=CALLS, data=st.data())
def test_what_a_template_writes_is_read(
    name: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    tool_calls = [
        {"id": f"functions.{called}:{at}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for at, (called, arguments) in enumerate(calls)
    ]
    told = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    asked, both = (
        template_of(name).render(messages, tools=TOOLS, add_generation_prompt=False)
        for messages in ([ASKED], [ASKED, told])
    )
    answer = both.removeprefix(asked)
    assert answer != both
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=4)))
    chunks = [answer[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    parser = AnswerFormat(FAMILIES[name]).parser(AnswerOptions(tools=TOOLS))
    read = [(call["name"], json.loads(call["arguments"])) for call in read_of(parsed(parser, chunks)).tool_calls]
    assert read == calls
    assert not parser.has_open_call
