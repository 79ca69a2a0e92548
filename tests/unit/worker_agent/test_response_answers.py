"""The events of a response's stream: of an engine that fails, of several calls, of an answer of nothing."""

import json
from typing import Any

import msgspec
import pytest

from worker_agent.api.choice_text import Piece
from worker_agent.api.parsers.calls import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStarted
from worker_agent.api.responses import ResponseAnswer, decode_response

USAGE = {
    "prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip


def answer(**fields: Any) -> ResponseAnswer:
    body = {"model": "m", "input": "hi"} | fields
    return ResponseAnswer(decode_response(json.dumps(body).encode()), "7", 1_700_000_000)


def read(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(each.partition(b"\ndata: ")[2]) for each in events.split(b"\n\n")[:-1]]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_an_engine_that_fails_in_the_middle_ends_the_response_as_failed() -> None:
    failing = answer()
    failing.opening()
    failing.events(Piece(events=(ContentDelta("hel"),)))
    events = read(failing.failed("the engine stopped", b""))
    assert kinds(events) == ["output_text.done", "content_part.done", "output_item.done", "failed"]
    assert [event["sequence_number"] for event in events] == [5, 6, 7, 8]
    response = events[-1]["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "the engine stopped")
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "hel")


@pytest.mark.parametrize("at_once", [True, False])
def test_each_kind_of_text_and_each_call_is_an_item_of_its_own(at_once: bool) -> None:
    events: list[Event] = [
        ReasoningDelta("so"),
        ContentDelta("I "),
        ContentDelta("call"),
        ToolCallStarted(0, "c0", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallStarted(1, "c1", "g"),
        ContentDelta("done"),
    ]
    pieces = [Piece(events=tuple(events))] if at_once else [Piece(events=(event,)) for event in events]
    streamed, whole = answer(), answer()
    got = [event for piece in pieces for event in read(streamed.events(piece))]
    got += read(streamed.ending(USAGE, include_usage=False))
    output = got[-1]["response"]["output"]
    assert [(item["type"], item["id"]) for item in output] == [
        ("reasoning", "rs_70"), ("message", "msg_71"), ("function_call", "fc_72"), ("function_call", "fc_73"),
        ("message", "msg_74"),
    ]  # fmt: skip
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:4]] == [
        ("c0", "f", "{}"), ("c1", "g", ""),
    ]  # fmt: skip
    assert [event["output_index"] for event in got if event["type"] == "response.output_item.done"] == [0, 1, 2, 3, 4]
    assert json.loads(whole.full_body(pieces, USAGE))["output"] == output


def test_a_form_of_the_answer_and_a_chosen_function_are_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    tool = {"type": "function", "name": "f", "parameters": {}}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}}
    body = {"model": "m", "input": "hi", "text": {"format": form}, "max_output_tokens": 3, **fields}
    chat = decode_response(json.dumps(body).encode())
    schema = {"name": "n", "description": None, "schema": {"type": "object"}, "strict": True}
    assert json.loads(msgspec.json.encode(chat.response_format)) == {"type": "json_schema", "json_schema": schema}
    assert msgspec.to_builtins(chat.tool_choice) == {"type": "function", "function": {"name": "f"}}
    assert (chat.limit_tokens, chat.kv_response["text"]) == (3, {"format": form})
