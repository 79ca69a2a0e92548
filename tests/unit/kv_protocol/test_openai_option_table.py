"""Every option of a request: what its type and range let pass at worker agents; a router lets all of them pass."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kv_protocol.openai.option_table import JsonSchema, Options, StreamOptions, StructuredOutputs
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
FAR = 1 << 40

SWITCHES = (
    *("stream", "store", "include_stop_str_in_output", "ignore_eos", "use_beam_search", "add_special_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
    "detokenize",
)
TEXTS = (
    *("guided_regex", "guided_grammar", "guided_whitespace_pattern", "guided_decoding_backend"),
    *("user", "service_tier", "safety_identifier"),
)

RIGHT: dict[str, list[Any]] = {
    "stream_options": [{}, {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}],
    "stop": ["a", [], ["a"] * 128],
    "early_stopping": [True, "never"],
    "logit_bias": [{}, {"5": -100, "6": 100.0}],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": {}, "strict": True}},
        {"type": "json", "schema": {"a": [1]}},
        {"type": "regex", "regex": "a+"},
        {"type": "ebnf", "ebnf": "root ::= x"},
        {"type": "structural_tag", "format": {"type": "any_text"}},
        {"type": "structural_tag", "structures": [{"begin": "<x>"}], "triggers": ["<x>"]},
    ],
    "guided_json": [{"type": "object"}, "{}"],
    "structured_outputs": [{"choice": ["a"]}, {"json": {}}, {"json": "{}"}, {"structural_tag": "{}"}],
    "structural_tag": [{"begin": "<x>"}, "{}"],
}
RIGHT_CHAT: dict[str, list[Any]] = {
    "tool_choice": ["none", "auto"],
    "tools": [[], TOOLS, [{"function": {"name": "f"}}]],
    "prediction": [{"type": "content", "content": "x"}],
    "chat_template_kwargs": [{"a": 1}],
    "documents": [[{"text": "d"}]],
}
RIGHT_COMPLETION: dict[str, list[Any]] = {"logprobs": [0, 20]}

WHOLE, SWITCH = "a whole number, ", "true or false"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({name: 1}, name, SWITCH) for name in SWITCHES),
    *(({name: 7}, name, "a string") for name in TEXTS),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", SWITCH),
    ({"max_tokens": 0}, "max_tokens", WHOLE + "1..16777216"),
    ({"min_tokens": -1}, "min_tokens", WHOLE + "0..16777216"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "0..5: the limit of the answer's tokens"),
    ({"n": 129}, "n", WHOLE + "1..128"),
    ({"best_of": 0}, "best_of", WHOLE + "1..128"),
    ({"stop": 7}, "stop", "a string or a list of strings, up to 128 items"),
    ({"stop": ["a"] * 129}, "stop", "a string or a list of strings, up to 128 items"),
    ({"stop": ["a", None]}, "stop[1]", "a string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", WHOLE + "0..4294967295"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "a list of whole numbers (0..4294967295), up to 128 items"),
    ({"temperature": 2.1}, "temperature", "a number, 0..2"),
    ({"top_p": 1.1}, "top_p", "a number, 0..1"),
    ({"top_k": -2}, "top_k", WHOLE + "-1..2147483647"),
    ({"min_p": -0.1}, "min_p", "a number, 0..1"),
    ({"top_p_min": 2}, "top_p_min", "a number, 0..1"),
    ({"seed": 1 << 63}, "seed", WHOLE + "-9223372036854775808..9223372036854775807"),
    ({"frequency_penalty": 3}, "frequency_penalty", "a number, -2..2"),
    ({"presence_penalty": True}, "presence_penalty", "a number, -2..2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "a number, more than 0"),
    ({"length_penalty": "x"}, "length_penalty", "a number"),
    ({"early_stopping": "soon"}, "early_stopping", 'true or false or "never"'),
    ({"logit_bias": {"5": 101}}, "logit_bias", "values: a number, -100..100"),
    ({"logit_bias": {"a": 1}}, "logit_bias", r"keys: a string, as ^[0-9]{1,10}\Z"),
    ({"logit_bias": {"5\n": 1}}, "logit_bias", r"keys: a string, as ^[0-9]{1,10}\Z"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "an object, up to 1024 keys"),
    ({"bad_words": [""]}, "bad_words[0]", "a string, 1 or more characters"),
    ({"bad_words": ["a"] * 129}, "bad_words", "up to 128 items"),
    ({"allowed_token_ids": [FAR]}, "allowed_token_ids[0]", WHOLE + "0..4294967295"),
    ({"logits_processors": [7]}, "logits_processors[0]", "a string"),
    ({"logits_processors": ["a"] * 17}, "logits_processors", "a list of strings, up to 16 items"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", WHOLE + "0..20"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", WHOLE + "-1..16777216"),
    ({"response_format": "json"}, "response_format", "an object"),
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
    ({"guided_json": 7}, "guided_json", "an object or a string"),
    ({"guided_choice": []}, "guided_choice", "a list of strings, 1..1024 items"),
    ({"guided_choice": [7]}, "guided_choice[0]", "a string"),
    ({"structured_outputs": {"surprise": 1}}, "structured_outputs.surprise", "no others"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json", "an object or a string"),
    ({"structural_tag": [1]}, "structural_tag", "an object or a string"),
    ({"cache_salt": 7}, "cache_salt", "a string, up to 1024 characters"),
    ({"priority": 1e10}, "priority", "a number, -1000000000..1000000000"),
    ({"metadata": "x"}, "metadata", "an object"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens", "0..5"),
    ({"logprobs": 3}, "logprobs", SWITCH),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", WHOLE + "0..20"),
    ({"top_logprobs": 2}, "top_logprobs", "none without logprobs: true"),
    ({"tool_choice": "any"}, "tool_choice", '"auto" or "none" or "required" or an object'),
    ({"tool_choice": 7}, "tool_choice", '"auto" or "none" or "required" or an object'),
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
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", SWITCH),
    ({"reasoning_effort": "x" * 65}, "reasoning_effort", "a string, up to 64 characters"),
    ({"verbosity": "loud"}, "verbosity", '"high" or "low" or "medium"'),
    ({"modalities": ["smell"]}, "modalities[0]", '"audio" or "text"'),
    ({"include_reasoning": "x"}, "include_reasoning", SWITCH),
    ({"thinking": "x"}, "thinking", "an object or true or false"),
    ({"prediction": "x"}, "prediction", "an object"),
    ({"prompt_cache_key": 7}, "prompt_cache_key", "a string"),
]
WRONG_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"echo": 1}, "echo", SWITCH),
    ({"suffix": 7}, "suffix", "a string"),
    ({"logprobs": 21}, "logprobs", WHOLE + "0..20"),
    ({"logprobs": True}, "logprobs", WHOLE + "0..20"),
]


def body(path: str, fields: dict[str, Any]) -> bytes:
    return json.dumps(REQUIRED[path] | fields).encode()


def right(path: str) -> Iterator[tuple[str, str, Any]]:
    for field, values in (RIGHT | (RIGHT_CHAT if path == CHAT else RIGHT_COMPLETION)).items():
        yield from ((path, field, value) for value in values)


def wrong(path: str) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    yield from ((path, *case) for case in WRONG + (WRONG_CHAT if path == CHAT else WRONG_COMPLETION))


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_what_an_option_may_be_is_read(decode: Decode) -> None:
    for path, field, value in [*right(CHAT), *right(COMPLETIONS)]:
        assert decode(path, body(path, {field: value})).model == "m", (path, field, value)


def test_what_an_option_may_not_be_is_refused_by_the_agent_and_left_to_it_by_the_router() -> None:
    for path, fields, field, allowed in [*wrong(CHAT), *wrong(COMPLETIONS)]:
        with pytest.raises(RequestInvalid) as refused:
            DECODERS["agent"](path, body(path, fields))
        assert refused.value.field == field
        assert allowed in refused.value.allowed, field
        assert DECODERS["router"](path, body(path, fields)).model == "m"


def test_every_option_is_tried_here() -> None:
    tried = {field for fields, _, _ in WRONG for field in fields}
    assert tried == set(Options.__struct_fields__) - {"nvext"}


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
