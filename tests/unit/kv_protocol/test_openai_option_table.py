"""Every option of a request: what its type and range let pass at worker agents; a router lets all of them pass."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kv_protocol.openai.errors import allowed_at
from kv_protocol.openai.option_table import JsonSchema, StreamOptions, StructuredOutputs
from kv_protocol.openai.requests import (
    CHAT,
    COMPLETIONS,
    ChatInbound,
    ChatRequest,
    CompletionInbound,
    CompletionRequest,
    RequestInvalid,
    decode_chat,
    decode_completion,
    decode_inbound,
)

REQUIRED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
}
Decode = Callable[[str, bytes], Any]
DECODERS: dict[str, Decode] = {
    "router": decode_inbound,
    "agent": lambda path, body: (decode_chat if path == CHAT else decode_completion)(body),
}
KINDS: list[tuple[str, type[msgspec.Struct]]] = [
    (CHAT, ChatInbound), (CHAT, ChatRequest), (COMPLETIONS, CompletionInbound), (COMPLETIONS, CompletionRequest),
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RIGHT: dict[str, list[Any]] = {
    "stream_options": [{}, {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}],
    "stop": [["a"] * 128],
    "logit_bias": [{"5": -100, "6": 100.0}],
    "response_format": [
        {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": {}, "strict": True}},
        {"type": "structural_tag", "format": {"type": "any_text"}},
        {"type": "structural_tag", "structures": [{"begin": "<x>"}], "triggers": ["<x>"]},
    ],
    "structured_outputs": [{"choice": ["a"]}, {"json": {}}, {"json": "{}"}, {"structural_tag": "{}"}],
}
RIGHT_CHAT: dict[str, list[Any]] = {"tool_choice": ["none", "auto"], "tools": [TOOLS, [{"function": {"name": "f"}}]]}

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "true or false"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "0..5: the limit of the answer's tokens"),
    ({"stop": ["a", None]}, "stop[1]", "a string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "a whole number, 0..4294967295"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "values: a number, -100..100"),
    ({"logit_bias": {"a": 1}}, "logit_bias", r"keys: a string, as ^[0-9]{1,10}\Z"),
    ({"logit_bias": {"5\n": 1}}, "logit_bias", r"keys: a string, as ^[0-9]{1,10}\Z"),
    ({"bad_words": [""]}, "bad_words[0]", "a string, 1 or more characters"),
    ({"allowed_token_ids": [1 << 40]}, "allowed_token_ids[0]", "a whole number, 0..4294967295"),
    ({"logits_processors": [7]}, "logits_processors[0]", "a string"),
    ({"response_format": {}}, "response_format.type", "a value: it is required"),
    ({"response_format": {"type": 7}}, "response_format.type", '"ebnf" or "json" or "json_object"'),
    ({"response_format": {"type": "xml"}}, "response_format.type", '"ebnf" or "json" or "json_object"'),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "no others"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "it is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
        "response_format.json_schema.schema",
        "an object",
    ),
    ({"response_format": {"type": "regex", "regex": 7}}, "response_format.regex", "a string"),
    ({"guided_choice": [7]}, "guided_choice[0]", "a string"),
    ({"structured_outputs": {"surprise": 1}}, "structured_outputs.surprise", "no others"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json", "an object or a string"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens", "0..5"),
    ({"top_logprobs": 2}, "top_logprobs", "none without logprobs: true"),
    ({"tool_choice": {"type": "magic"}}, "tool_choice.type", '"function"'),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "it is required"),
    ({"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice.function.name", "1 or more"),
    ({"tool_choice": "required"}, "tool_choice", '"none" or "auto": there are no tools'),
    ({"tool_choice": "required", "tools": []}, "tool_choice", '"none" or "auto": there are no tools'),
    ({"tool_choice": NAMED}, "tool_choice.function.name", "the name of one of tools (there are none)"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
        "tool_choice.function.name",
        "the name of one of tools (f)",
    ),
    ({"tool_choice": NAMED, "tools": [{"a": 1}]}, "tools[0].function", "it is required"),
    ({"modalities": ["smell"]}, "modalities[0]", '"audio" or "text"'),
]
NOT_CHECKED = {"nvext", "kv_prompt_ids", "kv_continue", "disaggregated_params", "prompt_token_ids"}
"""Keys that routers check, or that are checked where they are read."""
ANYTHING: tuple[Any, ...] = (
    *(True, -(1 << 63), -3, -2, -1, 0, 1, 2, 20, 21, 128, 129, 1 << 24, (1 << 24) + 1, 1 << 63, -0.5, 0.5, 1e10),
    *("", "x", "never", "x" * 65, "x" * 1025, [], [1], ["a"], ["a"] * 17, ["a"] * 129, {}, {"1": 1}, ["a"] * 1025),
    {str(key): 1 for key in range(1025)},
)
TEXTS = [json.dumps(each) for each in ANYTHING]


def body(path: str, fields: dict[str, Any]) -> bytes:
    return json.dumps(REQUIRED[path] | fields).encode()


def right(path: str) -> Iterator[tuple[str, str, Any]]:
    for field, values in (RIGHT | (RIGHT_CHAT if path == CHAT else {})).items():
        yield from ((path, field, value) for value in values)


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_what_an_option_may_be_is_read(decode: Decode) -> None:
    for path, field, value in [*right(CHAT), *right(COMPLETIONS)]:
        assert decode(path, body(path, {field: value})).model == "m", (path, field, value)


def test_a_rule_of_an_option_is_the_agent_s_and_the_router_lets_pass_what_breaks_it() -> None:
    for path, cases in ((CHAT, WRONG + WRONG_CHAT), (COMPLETIONS, WRONG)):
        for fields, field, allowed in cases:
            with pytest.raises(RequestInvalid) as refused:
                DECODERS["agent"](path, body(path, fields))
            assert refused.value.field == field
            assert allowed in refused.value.allowed, field
            assert DECODERS["router"](path, body(path, fields)).model == "m"


def test_an_agent_refuses_what_the_type_of_an_option_does_not_allow_and_the_router_lets_it_pass() -> None:
    """What each option may be is a row of `docs/reference/options.md`."""
    for path, kind in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
        checked = [each for each in msgspec.structs.fields(kind) if each.name not in (*REQUIRED[path], *NOT_CHECKED)]
        decoders = [(field, msgspec.json.Decoder(field.type)) for field in checked]
        of_chat = {"logprobs": True} if path == CHAT else {}
        for field, decoder, text in ((*each, text) for each in decoders for text in TEXTS):
            given = body(path, of_chat)[:-1] + f', "{field.name}": {text}}}'.encode()
            try:
                decoder.decode(text)
            except msgspec.ValidationError as error:
                with pytest.raises(RequestInvalid) as refused:
                    DECODERS["agent"](path, given)
                if re.fullmatch("(Expected|Invalid)(?:(?! - at ).)*", str(error)):
                    assert (refused.value.field, refused.value.allowed) == (field.name, allowed_at(kind, field.name))
                assert DECODERS["router"](path, given).model == "m"
            else:
                assert getattr(DECODERS["agent"](path, given), field.name) is not None, (field.name, text)


def test_a_tool_may_be_wanted_where_there_is_one() -> None:
    for choice in ("required", NAMED):
        assert decode_chat(body(CHAT, {"tool_choice": choice, "tools": TOOLS})).tool_choice is not None


def test_a_worker_reads_tools_also_where_none_is_chosen() -> None:
    with pytest.raises(RequestInvalid, match=r"^tools\[0\]\.function: found null, allowed a value: it is required$"):
        decode_chat(body(CHAT, {"tools": [{"a": 1}]}))


@pytest.mark.parametrize(("path", "kind"), KINDS)
def test_null_is_absence_for_every_optional_field(path: str, kind: type[msgspec.Struct]) -> None:
    decode = DECODERS["router" if kind in (ChatInbound, CompletionInbound) else "agent"]
    optional = [field.encode_name for field in msgspec.structs.fields(kind) if not field.required]
    nulls = decode(path, body(path, dict.fromkeys(optional)))
    assert {name for name in optional if getattr(nulls, name) not in (None, msgspec.Raw(b"null"))} == set()
    if path == CHAT and kind is ChatInbound:
        assert (nulls.is_guided, nulls.ineffective, nulls.read_options()) == (False, (), {})


def test_null_is_absence_inside_an_option_too() -> None:
    kinds: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
        (StreamOptions, {}), (StructuredOutputs, {}), (JsonSchema, {"schema": {}}),
    ]  # fmt: skip
    for kind, required in kinds:
        nulls = json.dumps(dict.fromkeys(kind.__struct_fields__) | required)
        assert msgspec.json.decode(nulls, type=kind) == msgspec.json.decode(json.dumps(required), type=kind)


def test_a_form_of_text_guides_nothing() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": None, "guided_json": None}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"guided_regex": "a"}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
    ]
    for fields, is_guided in cases:
        assert decode_inbound(CHAT, body(CHAT, fields)).is_guided is is_guided, fields
