"""What parsers do beyond the golden answers: names, bounds, what a request may say, and calls that are none."""

import json

import pytest

from tests.support.tool_calls import fed, parsed, read_of
from worker_agent.api.parsers.calls import (
    AnswerOptions,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallStarted,
)
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.api.parsers.reader import NAME_CHARACTERS_MAX

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = ({"type": "function", "function": {"name": "f"}},)
EVERYTHING = AnswerOptions(tools=TOOLS)


def parser(
    tools: str = "hermes",
    reasoning: str = "",
    wishes: AnswerOptions = EVERYTHING,
    answer: str = "a/0",
) -> AnswerParser:
    return AnswerFormat(tools, reasoning).parser(wishes, answer)


def ids_of(made: AnswerParser, text: str) -> list[str]:
    return [event.id for event in parsed(made, [text]) if isinstance(event, ToolCallStarted)]


def test_either_setting_chooses_gpt_oss() -> None:
    for names in (("harmony", ""), ("", "gpt_oss"), ("gpt_oss", "harmony")):
        assert "<|channel|>" in AnswerFormat(*names).special_tokens


def test_other_engines_names_are_known() -> None:
    calls = (
        *("qwen25", "qwen3", "llama3", "deepseekv3", "deepseekv31", "deepseekv32", "openai", "glm45", "glm47"),
        "minimax-m2",
    )
    reasoning = ("deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45", "minimax", "gpt-oss")
    for names in (*((name, "") for name in calls), *(("", name) for name in reasoning)):
        assert AnswerFormat(*names).special_tokens, names


def test_without_parsers_or_tools_nothing_is_parsed() -> None:
    text = f"\n <think>{CALL}"
    for made in (parser(""), parser(wishes=AnswerOptions())):
        assert (made.feed(text), made.finish(), made.shown_tokens) == ([ContentDelta(text)], [], ())


def test_gpt_oss_is_read_without_tools_and_its_calls_are_content() -> None:
    text = "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    assert parsed(parser("gpt_oss", wishes=AnswerOptions()), [text]) == [ReasoningDelta("r"), ContentDelta("{}")]


def test_only_the_begin_of_a_marker_waits() -> None:
    made = parser()
    assert fed(made, ["a < b <tool"]) == [ContentDelta("a < b ")]
    assert fed(made, ["box>"]) == [ContentDelta("<toolbox>")]


INTEGER, BY_NAME = {"type": "integer"}, {"$defs": {"a/b": {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}}}


def test_a_value_has_the_type_that_the_schema_gives_it() -> None:
    cases: list[tuple[object, dict[str, object], object]] = [
        (INTEGER, {}, 3),
        ({"type": ["null", "integer"]}, {}, 3),
        ({"type": "number"}, {}, 3),
        ({"type": "boolean"}, {}, "3"),
        ({"enum": [1, 3]}, {}, 3),
        ({"enum": ["1", "3"]}, {}, "3"),
        ({"const": 3}, {}, 3),
        ({"oneOf": [{"type": "object"}, INTEGER]}, {}, 3),
        ({"allOf": [{"$ref": "#/$defs/c"}]}, {"$defs": {"c": INTEGER}}, 3),
        ({"$ref": "#/$defs/a~1b"}, {"$defs": {**BY_NAME["$defs"], "c": INTEGER}}, 3),
        ({"$ref": "#/$defs/c"}, {"$defs": {"c": {"$ref": "#/$defs/c"}}}, "3"),
        ({"$ref": "https://example.org/schema"}, {}, "3"),
        ({"properties": {}}, {}, "3"),
        ({"type": 5}, {}, "3"),
        ({"type": [1, "integer"]}, {}, 3),
        ({"anyOf": [3, INTEGER]}, {}, 3),
        (7, {}, "3"),
        (None, {}, "3"),
    ]
    for schema, more, value in cases:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}, **more}}}
        made = parser("glm46", wishes=AnswerOptions(tools=[tool]))
        (call,) = read_of(
            parsed(made, ["<tool_call>f<arg_key>a</arg_key><arg_value>3</arg_value></tool_call>"])
        ).tool_calls
        assert json.loads(call["arguments"]) == {"a": value}, schema


def kimi(*names: str) -> str:
    calls = (f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for name in names)
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def test_kimi_names_its_calls_itself() -> None:
    text = kimi("functions.f:7", "g:8", "functions.f", "functions.f:7")
    ours = ids_of(parser("hermes"), CALL * 4)
    assert ids_of(parser("kimi_k2"), text) == ["functions.f:7", "g:8", ours[2], ours[3]]


def test_calls_are_named_alike_by_another_worker_and_unlike_in_other_answers() -> None:
    both = CALL * 2
    assert ids_of(parser(), both) == ids_of(parser(), both)
    others = [parser(answer="b/0"), parser(answer="a/1")]
    every = ids_of(parser(), both) + [call_id for other in others for call_id in ids_of(other, both)]
    assert len(set(every)) == 6


def test_ids_of_mistral_are_nine_letters_or_digits() -> None:
    (call_id,) = ids_of(parser("mistral"), "[TOOL_CALLS]f{}")
    assert len(call_id) == 9
    assert call_id.isalnum()


def test_only_the_first_call_is_kept_where_calls_may_not_be_parallel() -> None:
    made = parser(wishes=AnswerOptions(tools=TOOLS, only_first_call=True))
    assert len(read_of(parsed(made, [CALL * 3])).tool_calls) == 1
    assert made.calls == 1
    assert made.finish_reason("stop") == "tool_calls"


def test_reasoning_is_dropped_where_it_is_not_wanted() -> None:
    made = parser("", "deepseek_r1", AnswerOptions(keeps_reasoning=False))
    assert parsed(made, ["r</think>c"]) == [ContentDelta("c")]


NO_NAMES = ("", "f" * (NAME_CHARACTERS_MAX + 1))


def test_what_cannot_be_a_function_is_content() -> None:
    cases: list[tuple[str, str, tuple[str, ...]]] = [
        ("glm46", "<tool_call>%s\n<arg_key>a</arg_key>", ("two words", 'f"g')),
        ("minimax_m2", "<minimax:tool_call><invoke name=%s>", ("two words", 'f"g')),
        ("qwen3_coder", "<tool_call><function=%s>", ("two words", 'f"g')),
        ("deepseek_v32", "<\uff5cDSML\uff5cinvoke name=%s>", ("two words", 'f"g')),
        ("hermes", '<tool_call>{"name": "%s", "arguments": {}}', ("\\ud800",)),
    ]
    for family, form, names in cases:
        for name in (*NO_NAMES, *names):
            made, text = parser(family), form % name
            shown = "".join(event.text for event in parsed(made, [text]) if isinstance(event, ContentDelta))
            assert (shown, made.calls) == (text, 0), name


def test_white_space_alone_is_an_answer() -> None:
    assert parsed(parser(), ["\n", " \n"]) == [ContentDelta("\n \n")]


def test_white_space_around_calls_is_markup() -> None:
    assert read_of(parsed(parser(), ["\n\n", CALL, "\n", CALL, "\n \nand"])).content == "and"


def test_a_call_that_is_none_does_not_hide_the_next() -> None:
    read = read_of(parsed(parser(), ["<tool_call>no<tool_call>", CALL]))
    assert (read.content, len(read.tool_calls)) == ("<tool_call>no<tool_call>", 1)


@pytest.mark.parametrize("given", ['"arguments": null', '"arguments": null, "x": 1'])
@pytest.mark.parametrize("form", ['{"name": "f", %s}', '{%s, "name": "f"}'])
def test_null_arguments_are_an_empty_object(form: str, given: str) -> None:
    call = "<tool_call>" + form % given + "</tool_call>"
    assert parsed(parser(), [call]) == parsed(parser(), ['<tool_call>{"name": "f", "arguments": {}}</tool_call>'])


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("hermes", CALL),
        ("hermes", CALL.replace("<tool_call>", "<tool_call>\n")),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {}}'),
    ],
)
@pytest.mark.parametrize("behind", ["", "</think>"])
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_a_call_in_an_open_thought_ends_it(reasoning: str, tools: str, call: str, behind: str) -> None:
    found = read_of(parsed(parser(tools, reasoning), [f"<think>so {call}{behind}"]))
    assert ((found.reasoning or "").strip(), found.content, len(found.tool_calls)) == ("so", None, 1)


def test_what_began_as_a_call_in_a_thought_and_is_none_does_not_keep_the_thoughts_end() -> None:
    text = "<think>No <|tool_call_begin|> here.</think>Hello."
    assert read_of(parsed(parser("kimi_k2", "kimi_k2"), [text])).content == "<|tool_call_begin|> here.Hello."


def test_without_tools_a_call_in_an_open_thought_is_part_of_it() -> None:
    made = parser("hermes", "qwen3", AnswerOptions())
    assert read_of(parsed(made, [f"<think>so {CALL}"])).reasoning == f"so {CALL}"
