"""`make engines`: structural tags of forced calls in the xgrammar that TensorRT-LLM pins; its tokens are bytes."""

import json
from typing import Any

import pytest

from tests.support import engine_wheels
from tests.support.structural_tags import Format, accepts
from tests.support.tool_calls import golden_cases
from tests.unit.worker_agent.test_forced_calls import ONE, tag

_RAW, _END = 0, 256
_VOCABULARY = [bytes([each]) for each in range(_END)] + [b"</s>"]


@pytest.fixture(scope="module")
def compiler() -> Any:
    bindings = engine_wheels.xgrammar()
    tokens = bindings.TokenizerInfo(_VOCABULARY, _RAW, len(_VOCABULARY), [_END], False)
    return bindings, bindings.GrammarCompiler(tokens, 1, True, -1)


def may_be_written(compiler: Any, made: Format, text: str) -> bool:
    """Return whether xgrammar lets a model write the text, byte by byte, and end behind it."""
    bindings, grammars = compiler
    matcher = bindings.GrammarMatcher(grammars.compile_structural_tag(json.dumps(made)), None, False, -1)
    return all(matcher.accept_token(token, False) for token in (*text.encode(), _END))


@pytest.mark.parametrize("family", ONE)
def test_xgrammar_reads_the_tags_as_the_tests_do(compiler: Any, family: str) -> None:
    call = ONE[family] % "f"
    texts = [
        call,
        f"\n{call}",
        *(ONE[family] % name for name in ("f2", "h", "")),
        "",
        "Hello.",
        f"{call} x",
        call[:-1],
        call * 2,
    ]
    thoughts = ("<think>Why?</think>\n", "Why?</think>", f"<think>{call}</think>", "<|channel>thought\nWhy?<channel|>")
    texts += [thought + call for thought in (*thoughts, "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant")]
    for reasoning in {"", family if family in ("gpt_oss", "gemma4", "kimi_k2") else "qwen3"}:
        for only_one in (False, True):
            made = tag(family, reasoning, only_one=only_one)
            for text in texts:
                assert may_be_written(compiler, made, text) == accepts(made, text), (reasoning, only_one, text)


@pytest.mark.parametrize(
    "case", [each for each in golden_cases() if each.family in ONE], ids=lambda case: f"{case.family}: {case.name}"
)
def test_xgrammar_takes_the_golden_answers_that_the_tests_take(compiler: Any, case: Any) -> None:
    made = tag(case.family, case.reasoning_parser, case.prompt_end, case.tools)
    assert may_be_written(compiler, made, case.text) == accepts(made, case.text)


def test_a_strict_function_has_arguments_by_its_schema(compiler: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = tag("hermes", tools=[{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}])
    written = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert may_be_written(compiler, made, written % '{"a": 3}')
    assert not may_be_written(compiler, made, written % '{"a": "3"}')
    assert not may_be_written(compiler, made, written % "{}")
