"""Structural tags of forced calls: the answers that a model may write, and those that it may not."""

import json
from typing import Any

import pytest

from tests.support.structural_tags import accepts
from tests.support.tool_calls import Case, golden_cases, parsed, read_of
from worker_agent.api.parsers.calls import AnswerOptions
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.api.parsers.forced_calls import forced_calls

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "f2", "g")
]
ONE = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": {"a": "}"}}\n</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": {"a": "}"}}',
    "qwen3_coder": "<tool_call>\n<function=%s>\n<parameter=a>\n}\n</parameter>\n</function>\n</tool_call>",
    "glm46": "<tool_call>%s\n<arg_key>a</arg_key>\n<arg_value>}</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="%s">\n<parameter name="a">}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:12<|tool_call_argument_begin|>"
    '{"a": "}"}<|tool_call_end|><|tool_calls_section_end|>',
    "gemma4": '<|tool_call>call:%s{a:<|"|>}<|"|>}<tool_call|>',
    "deepseek_v3": "<!tool▁calls▁begin!><!tool▁call▁begin!>function<!tool▁sep!>%s\n```json\n"
    '{"a": "}"}\n```<!tool▁call▁end!><!tool▁calls▁end!>',
    "deepseek_v31": "<!tool▁calls▁begin!><!tool▁call▁begin!>%s<!tool▁sep!>"
    '{"a": "}"}<!tool▁call▁end!><!tool▁calls▁end!>',
    "deepseek_v32": '<!DSML!function_calls>\n<!DSML!invoke name="%s">\n<!DSML!parameter name="a" string="true">}'
    "</!DSML!parameter>\n</!DSML!invoke>\n</!DSML!function_calls>",
    "gpt_oss": '<|channel|>commentary to=functions.%s <|constrain|>json<|message|>{"a": "}"}<|call|>',
}
ONE = {family: call.replace("!", "\uff5c") for family, call in ONE.items()}
"""A call as each family writes it."""
BETWEEN = {"hermes": "\n", "llama3_json": "; ", "qwen3_coder": "\n", "glm46": "\n", "gemma4": ""}
"""Of families whose calls stand alone, what is between them."""
each_family = pytest.mark.parametrize("family", ONE)


def forced(
    family: str,
    reasoning: str = "",
    prompt_end: str = "",
    tools: list[dict[str, Any]] = TOOLS,
    *,
    only_one: bool = False,
    begun: str = "",
) -> dict[str, Any] | None:
    options = AnswerOptions(tools=tools, only_first_call=only_one)
    return forced_calls(AnswerFormat(family, reasoning).parser(options, prompt_end=prompt_end), begun)


def tag(*names: Any, **more: Any) -> dict[str, Any]:
    made = forced(*names, **more)
    assert made is not None
    return made


@each_family
def test_an_answer_is_a_call_of_one_of_the_functions(family: str) -> None:
    made = tag(family)
    for name in ("f", "f2", "g"):
        assert accepts(made, ONE[family] % name)
        assert accepts(made, "\n\n" + ONE[family] % name)
    for other in ("", "h", "f2 ", "ff"):
        assert not accepts(made, ONE[family] % other)
    for other in ("", "Hello.", f"I call {ONE[family] % 'f'}", f"{ONE[family] % 'f'} Done.", (ONE[family] % "f")[:-1]):
        assert not accepts(made, other)


@each_family
def test_what_the_model_may_write_is_read_as_one_call(family: str) -> None:
    parser = AnswerFormat(family).parser(AnswerOptions(tools=TOOLS))
    found = read_of(parsed(parser, ["\n" + ONE[family] % "f2"]))
    assert (found.content or "").strip() == ""
    assert found.tool_calls == [{"name": "f2", "arguments": '{"a": "}"}'}]


@pytest.mark.parametrize("family", BETWEEN)
def test_there_may_be_several_calls_unless_one_is_asked_for(family: str) -> None:
    both = BETWEEN[family].join((ONE[family] % "f", ONE[family] % "g"))
    assert accepts(tag(family), both)
    assert not accepts(tag(family, only_one=True), both)


def test_a_call_of_gpt_oss_ends_its_answer() -> None:
    assert not accepts(tag("gpt_oss"), ONE["gpt_oss"] % "f" * 2)


@pytest.mark.parametrize(
    ("family", "reasoning", "closing"),
    [(family, name, "</think>") for family, name in (("hermes", "qwen3"), ("glm46", "glm46"), ("kimi_k2", "kimi_k2"))]
    + [("gemma4", "gemma4", "<channel|>"), ("gpt_oss", "gpt_oss", "<|end|><|start|>assistant")],
)
def test_reasoning_may_stand_before_the_call_and_has_none_within(family: str, reasoning: str, closing: str) -> None:
    made, call = tag(family, reasoning), ONE[family] % "f"
    opening = {"gemma4": "<|channel>thought\n", "gpt_oss": "<|channel|>analysis<|message|>"}.get(family, "<think>")
    assert accepts(made, call)
    assert accepts(made, f"{opening}Why <b>?{closing}{call}")
    assert accepts(made, f"\n{opening}{closing}\n\n{call}")
    assert not accepts(made, f"{opening}Why?{call}")
    assert not accepts(made, f"Why?{closing}{call}")
    if family != "gpt_oss":
        assert not accepts(made, f"{opening}{call}{closing}{call}")


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "minimax_m2"])
def test_the_prompts_end_says_whether_the_answer_begins_with_reasoning(reasoning: str) -> None:
    call = ONE["hermes"] % "f"
    begun, over = tag("hermes", reasoning, "<think>\n"), tag("hermes", reasoning, "<think></think>")
    assert accepts(begun, f"Why?</think>\n{call}")
    assert not accepts(begun, call)
    assert accepts(over, call)
    assert not accepts(over, f"<think></think>{call}")


@pytest.mark.parametrize(
    ("prompt_end", "begun", "is_forced"),
    [
        *(("", begun, True) for begun in ("", "\n\n\n", "<", "<tool", "\n<tool_call>\n", "<th", "<think>\nI")),
        *(("", begun, False) for begun in ("I", "\n\n\n\n", " <tool_call>", "<tool_call>I", "</think>")),
        *(("<think>\n", begun, True) for begun in ("I", "<tool_call>", "</think>")),
        ("<think>\n", "<tool_call>\n{", False),
        *(("<think></think>", begun, begun == "<tool_") for begun in ("<tool_", "<think>", "I")),
    ],
)
def test_calls_are_forced_behind_a_first_token_that_may_begin_them(
    prompt_end: str, begun: str, *, is_forced: bool
) -> None:
    made = forced("hermes", "qwen3", prompt_end, begun=begun)
    assert made == (tag("hermes", "qwen3", prompt_end) if is_forced else None)


def test_prompts_of_gpt_oss_end_with_what_ends_its_reasoning() -> None:
    made = tag("gpt_oss", prompt_end="<|end|><|start|>assistant")
    assert accepts(made, f"<|channel|>analysis<|message|>Why?<|end|><|start|>assistant{ONE['gpt_oss'] % 'f'}")


@pytest.mark.parametrize(("strict", "schema"), [(True, {"type": "object", "title": "T"}), (None, {"type": "object"})])
def test_only_a_strict_function_has_arguments_by_its_schema(strict: bool | None, schema: dict[str, str]) -> None:
    function = {"name": "f", "parameters": {"type": "object", "title": "T"}, "strict": strict}
    made = tag("deepseek_v31", tools=[{"type": "function", "function": function}])
    assert f'"content": {{"type": "json_schema", "json_schema": {json.dumps(schema)}}}' in json.dumps(made)


def test_a_functions_name_is_quoted_as_json() -> None:
    made = tag("hermes", tools=[{"type": "function", "function": {"name": 'say "é"'}}])
    assert accepts(made, ONE["hermes"] % 'say \\"é\\"')


def test_calls_of_mistral_are_not_forced() -> None:
    assert forced("mistral") is None
    assert forced("", "qwen3") is None
    without = {case.tool_call_parser for case in golden_cases()} - set(ONE)
    assert without == {"mistral"}


TEMPLATES = [case for case in golden_cases() if case.name == "two calls of all types"]


@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: case.family)
def test_golden_answers_that_are_only_calls_may_be_written(case: Case) -> None:
    assert accepts(tag(case.family, case.reasoning_parser, case.prompt_end, case.tools), case.text)
