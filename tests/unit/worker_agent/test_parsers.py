"""What parsers do beyond the golden answers: names, bounds, what a request may say, and calls that are none."""

import pytest

from tests.support.tool_calls import fed, parsed, read_of
from worker_agent.api.parsers.answer import AnswerOptions, AnswerParser
from worker_agent.api.parsers.calls import CALLS_MAX, NAME_CHARACTERS_MAX
from worker_agent.api.parsers.events import ContentDelta, ReasoningDelta, ToolCallStarted
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.api.parsers.reader import HELD_CHARACTERS_MAX

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
EVERYTHING = AnswerOptions(finds_calls=True)


def parser(
    tools: str = "hermes",
    reasoning: str = "",
    wishes: AnswerOptions = EVERYTHING,
    answer_id: str = "a",
    choice: int = 0,
) -> AnswerParser:
    made = AnswerFormat(tools, reasoning).parser(wishes, answer_id=answer_id, choice=choice)
    assert made is not None
    return made


def ids_of(made: AnswerParser, text: str) -> list[str]:
    return [event.id for event in parsed(made, [text]) if isinstance(event, ToolCallStarted)]


def test_an_unknown_parser_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"^allowed hermes, llama3_json, .*, gpt_oss, harmony, or none"):
        AnswerFormat("hermez")
    with pytest.raises(ValueError, match=r"^allowed deepseek_r1, qwen3, gpt_oss, harmony, or none"):
        AnswerFormat("", "r1")


def test_gpt_oss_goes_with_no_other_parser() -> None:
    with pytest.raises(ValueError, match="found tool_call_parser hermes beside reasoning_parser gpt_oss"):
        AnswerFormat("hermes", "harmony")
    for names in (("harmony", ""), ("", "gpt_oss"), ("gpt_oss", "harmony")):
        assert "<|channel|>" in AnswerFormat(*names).special_tokens


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "deepseekv3", "deepseekv31", "openai"])
def test_other_engines_names_are_known(name: str) -> None:
    assert AnswerFormat(name).parser(EVERYTHING, answer_id="a", choice=0) is not None


def test_without_parsers_or_tools_nothing_is_parsed() -> None:
    assert AnswerFormat().parser(EVERYTHING, answer_id="a", choice=0) is None
    assert AnswerFormat("hermes").parser(AnswerOptions(), answer_id="a", choice=0) is None


def test_gpt_oss_is_read_without_tools_and_its_calls_are_content() -> None:
    text = "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    assert parsed(parser("gpt_oss", wishes=AnswerOptions()), [text]) == [ReasoningDelta("r"), ContentDelta("{}")]


def test_only_the_begin_of_a_marker_waits() -> None:
    made = parser()
    assert fed(made, ["a < b <tool"]) == [ContentDelta("a < b ")]
    assert fed(made, ["box>"]) == [ContentDelta("<toolbox>")]


@pytest.mark.parametrize(
    "schema", [{"type": 5}, {"type": [1, "integer"]}, {"anyOf": [3, {"type": "integer"}]}, 7, None]
)
def test_schemas_that_say_odd_things_do_no_harm(schema: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    made = parser("qwen3_coder", wishes=AnswerOptions(finds_calls=True, tools=[tool]))
    (call,) = read_of(parsed(made, ["<function=f><parameter=a>3</parameter></function>"])).tool_calls
    assert call["arguments"] == ('{"a": 3}' if "integer" in str(schema) else '{"a": "3"}')


def test_calls_are_named_alike_by_another_worker_and_unlike_in_other_answers() -> None:
    both = CALL * 2
    assert ids_of(parser(), both) == ids_of(parser(), both)
    others = [parser(answer_id="b"), parser(choice=1)]
    every = ids_of(parser(), both) + [call_id for other in others for call_id in ids_of(other, both)]
    assert len(set(every)) == 6


def test_ids_of_mistral_are_nine_letters_or_digits() -> None:
    (call_id,) = ids_of(parser("mistral"), "[TOOL_CALLS]f{}")
    assert len(call_id) == 9
    assert call_id.isalnum()


def test_only_the_first_call_is_kept_where_calls_may_not_be_parallel() -> None:
    made = parser(wishes=AnswerOptions(finds_calls=True, only_first_call=True))
    assert len(read_of(parsed(made, [CALL * 3])).tool_calls) == 1
    assert made.calls == 1
    assert made.finish_reason("stop") == "tool_calls"


def test_reasoning_is_dropped_where_it_is_not_wanted() -> None:
    made = parser("", "deepseek_r1", AnswerOptions(keeps_reasoning=False))
    assert parsed(made, ["r</think>c"]) == [ContentDelta("c")]


def test_calls_beyond_the_bound_are_content() -> None:
    read = read_of(parsed(parser(), [CALL * (CALLS_MAX + 1)]))
    assert len(read.tool_calls) == CALLS_MAX
    assert read.content == CALL


@pytest.mark.parametrize("name", ["f" * (NAME_CHARACTERS_MAX + 1), "", "\\ud800"])
def test_what_cannot_be_a_function_is_content(name: str) -> None:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}'
    made = parser()
    assert "".join(event.text for event in parsed(made, [text]) if isinstance(event, ContentDelta)) == text
    assert made.calls == 0


def test_arguments_before_a_name_wait_no_longer_than_the_bound() -> None:
    made = parser()
    begun = '<tool_call>{"arguments": "' + "x" * HELD_CHARACTERS_MAX
    shown = fed(made, [begun[at : at + 4096] for at in range(0, len(begun), 4096)])
    assert shown
    assert isinstance(shown[0], ContentDelta)


def test_a_value_that_waits_for_its_end_becomes_text_beyond_the_bound() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}}
    made = parser("qwen3_coder", wishes=AnswerOptions(finds_calls=True, tools=[tool]))
    long = "1," * HELD_CHARACTERS_MAX
    events = parsed(made, ["<function=f><parameter=a>", long, "</parameter></function>"])
    assert read_of(events).tool_calls == [{"name": "f", "arguments": f'{{"a": "{long}"}}'}]


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


def test_without_tools_a_call_in_an_open_thought_is_part_of_it() -> None:
    made = AnswerFormat("hermes", "qwen3").parser(AnswerOptions(), answer_id="a", choice=0)
    assert made is not None
    assert read_of(parsed(made, [f"<think>so {CALL}"])).reasoning == f"so {CALL}"
