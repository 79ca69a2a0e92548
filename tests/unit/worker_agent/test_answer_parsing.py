"""From an engine's tokens to events: special tokens reach the parser of a format that needs them, end tokens do not."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from kv_protocol.openai.requests import CompletionRequest, decode_chat, decode_completion
from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from tests.support.chat_ids import chat_ids
from tests.support.engine_description import described
from tests.support.tool_calls import Case, golden_cases, read_of
from tests.unit.kv_runtime.model_files import QWEN_TEMPLATE, qwen_like, write_model
from worker_agent.api.choice_text import AnswerParsing, ChoiceText
from worker_agent.api.parsers.calls import ContentDelta, Event, joined
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.api.request_rules import RequestRules
from worker_agent.config import AgentSettings
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineOutput

DESCRIPTION = described(
    event_source="trtllm", block_size=16, total_kv_blocks=10, max_num_seqs=1, max_num_batched_tokens=16, max_seq_len=64
)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def model_with(directory: Path, special_tokens: tuple[str, ...], end: str = "<|im_end|>") -> Text:
    tokenizer = qwen_like()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special_tokens])
    return load_text(write_model(directory, tokenizer, QWEN_TEMPLATE, eos_token=end))


def parsing(text: Text, tools: str, reasoning: str = "") -> AnswerParsing:
    return AnswerParsing(AnswerFormat(tools, reasoning), text)


WITH_SPECIAL_TOKENS = [case for case in golden_cases() if not case.prompt_end]


@pytest.mark.parametrize("case", WITH_SPECIAL_TOKENS, ids=lambda case: f"{case.family}: {case.name}")
def test_markers_that_are_special_tokens_are_read(case: Case, tmp_path: Path) -> None:
    answer_format = AnswerFormat(case.tool_call_parser, case.reasoning_parser)
    text = model_with(tmp_path, answer_format.special_tokens)
    wanted = AnswerParsing(answer_format, text)
    request = decode_chat(json.dumps(CHAT | {"tools": case.tools}).encode())
    parser = wanted.parser_of(request, tuple(chat_ids(text, request.messages)), "chatcmpl-1")(0)
    choice = ChoiceText(0, text, (), parser, with_logprobs=False)
    events: list[Event] = []
    ids = (*text.encode(case.text, add_special_tokens=False), *text.eos_ids)
    for token in ids:
        events += choice.push(EngineOutput(token_ids=(token,), cached_tokens=0)).events
    last = choice.push(EngineOutput(token_ids=(), cached_tokens=0, finish_reason="stop"))
    assert read_of(joined([*events, *last.events])) == case.read
    assert last.finish_reason == case.finish_reason
    assert any(token in text.special_ids.values() for token in ids)


@pytest.mark.parametrize(("enabled", "reasoning"), [(False, None), (True, "why")])
def test_the_end_of_the_prompt_says_whether_there_is_reasoning(
    tmp_path: Path, *, enabled: bool, reasoning: str | None
) -> None:
    text = model_with(tmp_path, ())
    request = decode_chat(json.dumps(CHAT | {"chat_template_kwargs": {"enable_thinking": enabled}}).encode())
    prompt = tuple(chat_ids(text, request.messages, **request.template_options))
    parser = parsing(text, "", "qwen3").parser_of(request, prompt, "a")(0)
    assert read_of(parser.feed("<think>why</think>") + parser.finish()).reasoning == reasoning


def test_tokens_that_end_answers_of_a_format_stop_requests(tmp_path: Path) -> None:
    text = model_with(tmp_path, AnswerFormat("gpt_oss").special_tokens, "<|return|>")
    stops = parsing(text, "gpt_oss").stop_tokens
    assert stops == {text.special_ids["<|call|>"], text.special_ids["<|return|>"]}
    rules = RequestRules(DESCRIPTION, text, default_max_tokens=1, stop_tokens=stops)
    request = decode_chat(json.dumps(CHAT).encode())
    assert set(rules.wishes(request).stop_token_ids) == stops
    ignoring = decode_chat(json.dumps(CHAT | {"ignore_eos": True}).encode())
    assert rules.wishes(ignoring).stop_token_ids == ()
    assert parsing(text, "hermes").stop_tokens == frozenset()


@pytest.mark.parametrize(("begun", "is_forced"), [("<tool_call>", True), ("<think>", True), ("hi", False)])
def test_calls_are_forced_where_the_prefill_workers_token_may_begin_them(
    tmp_path: Path, begun: str, *, is_forced: bool
) -> None:
    text = model_with(tmp_path, ("<think>", "<tool_call>"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = decode_chat(json.dumps(CHAT | {"tools": tools, "tool_choice": "required"}).encode())
    first = tuple(text.encode(begun, add_special_tokens=False))
    guide = parsing(text, "hermes", "qwen3").forced_guide(request, (), Handoff(first_gen_tokens=first))
    assert (guide is not None) == is_forced


def test_completions_have_no_parser(tmp_path: Path) -> None:
    request = decode_completion(b'{"model": "m", "prompt": "hi"}')
    assert isinstance(request, CompletionRequest)
    parser = parsing(model_with(tmp_path, ()), "gpt_oss").parser_of(request, (1,), "a")(0)
    assert (parser.feed("<|start|>"), parser.shown_tokens) == ([ContentDelta("<|start|>")], ())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("engine.tool_call_parser=hermez",), "engine.tool_call_parser: found 'hermez'.* allowed hermes, .*or none"),
        (("engine.reasoning_parser=r1",), "engine.reasoning_parser: found 'r1'.* allowed deepseek_r1, qwen3"),
        (
            ("engine.tool_call_parser=hermes", "engine.reasoning_parser=gpt_oss"),
            "found tool_call_parser hermes beside reasoning_parser gpt_oss, allowed gpt_oss for both",
        ),
    ],
)
def test_an_unknown_parser_is_refused_at_the_start(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_settings(AgentSettings, file=None, assignments=settings, flags={})
