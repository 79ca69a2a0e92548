"""A request to `/v1/responses`: the chat that it is, and what is refused because nothing is stored."""

import json
from typing import Any, cast

import pytest

from kv_protocol.openai.requests import RequestInvalid, decode_inbound
from kv_protocol.openai.responses import RESPONSES, ResponsesInbound, chat_messages, chat_tools


def inbound(**fields: Any) -> ResponsesInbound:
    body = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    return cast("ResponsesInbound", decode_inbound(RESPONSES, body))


def text(role: str, *words: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": word, "annotations": []} for word in words]
    return {"type": "message", "id": "msg_1", "status": "completed", "role": role, "content": content}


CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "status": "done"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SAID_SO = {"reasoning": "so", "reasoning_content": "so"}


@pytest.mark.parametrize(
    ("instructions", "given", "expected"),
    [
        (None, "hi", [{"role": "user", "content": "hi"}]),
        ("be terse", "hi", [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hi"}]),
        (None, [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        (None, [text("user", "a", "b")], [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        (None, [text("assistant", "a", "b")], [{"role": "assistant", "content": "ab"}]),
        (None, [text("assistant", "a"), text("assistant", "b")], [
            {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]),
        (None, [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}], [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]),
        (None, [REASONING, text("assistant", "a"), CALL, CALL, OUTPUT], [
            {"role": "assistant", **SAID_SO, "content": "a", "tool_calls": [CHAT_CALL, CHAT_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"}]),
        (None, [CALL], [{"role": "assistant", "tool_calls": [CHAT_CALL], "content": None}]),
        (None, [CALL | {"arguments": "{"}], [{"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]),
        (None, [REASONING], [{"role": "assistant", **SAID_SO, "content": ""}]),
        (None, [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, text("assistant", "a")], [
            {"role": "assistant", "content": "a"}]),
        (None, [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}], [
            {"role": "assistant", **SAID_SO, "content": ""}]),
    ],
)  # fmt: skip
def test_items_become_the_messages_that_engines_make_of_them(
    instructions: str | None, given: Any, expected: list[dict[str, Any]]
) -> None:
    assert chat_messages(instructions, given) == expected


def test_an_item_that_may_not_be_is_named_by_its_place() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "web_search_call"}, r"input\[1\].type: found \"web_search_call\", allowed message, function_call"),
        ({"type": "item_reference", "id": "msg_1"}, r"input\[1\].type"),
        ({"type": 7}, r"input\[1\].type"),
        ({"role": "robot", "content": "x"}, r"input\[1\].role"),
        ({"role": "user"}, r"input\[1\].content"),
        ({"role": "user", "content": [{"type": "input_file"}]}, r"input\[1\].content\[0\].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, r"input\[1\].content\[0\].text"),
        (CALL | {"arguments": {}}, r"input\[1\].arguments"),
        (OUTPUT | {"call_id": None}, r"input\[1\].call_id"),
        (REASONING | {"content": "so"}, r"input\[1\].content"),
    ]
    for item, place in cases:
        with pytest.raises(RequestInvalid, match=place):
            chat_messages(None, [{"role": "user", "content": "hi"}, item])


def test_no_items_are_refused() -> None:
    with pytest.raises(RequestInvalid, match="input: found \\[\\], allowed a text, or at least one item"):
        chat_messages(None, [])


def test_functions_are_tools_of_a_chat_and_others_are_left_out() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    expected = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    assert chat_tools([function, {"type": "web_search"}]) == [expected]
    assert inbound(tools=[function]).read_options() == {"tools": [expected]}
    assert inbound(reasoning={"effort": "low", "summary": None}).read_options() == {"reasoning_effort": "low"}


def test_a_tool_that_each_engine_renders_in_its_own_way_is_named_by_its_place() -> None:
    for kind in ("custom", "namespace"):
        with pytest.raises(RequestInvalid, match=rf'tools\[1\].type: found "{kind}"'):
            chat_tools([{"type": "function", "name": "f"}, {"type": kind, "name": "g"}])


def test_what_an_engine_has_stored_changes_the_prompt() -> None:
    for key in ("previous_response_id", "conversation", "prompt"):
        assert (inbound(**{key: {"id": "1"}}).changed_by, inbound(**{key: None}).changed_by) == (key, "")


def test_what_asks_for_nothing_passes_and_what_routing_needs_is_read() -> None:
    read = inbound(
        store=False, background=False, previous_response_id=None, max_output_tokens=9, stream=True, cache_salt="s",
        metadata={"a": "b"}, user="u", structured_outputs={"json": {}}, text={"format": {"type": "text"}},
    )  # fmt: skip
    assert (read.endpoint, read.path, read.limit_tokens, read.salt) == ("responses", RESPONSES, 9, "s")


def test_a_body_with_input_is_a_response_where_the_path_does_not_say() -> None:
    assert decode_inbound("/v1/route", b'{"model":"m","input":"x"}').path == RESPONSES
