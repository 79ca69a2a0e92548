"""OpenAI requests: what is read, and how what may not be is named."""

import json
from typing import Any

import pytest

from kv_protocol.hashing import pack_tokens
from kv_protocol.openai.requests import ChatRequest, RequestInvalid, decode_chat, decode_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({**CHAT, **fields}).encode())


@pytest.mark.parametrize(
    ("field", "value", "named", "words"),
    [
        ("model", 7, "model", "found 7, allowed a string"),
        ("messages", [], "messages", "a list of objects, 1 or more items"),
        ("messages", [1], "messages[0]", "found 1"),
        ("stream_options", {"usage": True}, "stream_options.usage", "no others"),
        ("typo", 1, "typo", "no others"),
    ],
)
def test_a_chat_field_that_may_not_be_is_named(field: str, value: Any, named: str, words: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        chat(**{field: value})
    assert refused.value.field == named
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[1]", b"\xff", b"[" * 100_000, b'{"model":"m","messages":[],"x":' + b"[" * 100_000],
    ids=["empty", "cut", "null", "array", "bytes", "deep", "deep field"],
)
@pytest.mark.parametrize("decode", [decode_chat, decode_completion])
def test_what_is_no_request_is_refused_whatever_it_is(body: bytes, decode: Any) -> None:
    with pytest.raises(RequestInvalid):
        decode(body)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="a").stops == ("a",)
    assert chat(stop=["a", "b"]).stops == ("a", "b")
    assert chat().stops == ()


def test_usage_in_a_stream_is_asked_for() -> None:
    assert chat(stream_options={"include_usage": True}).include_usage
    assert not chat().include_usage


def test_a_salt_may_come_with_the_extension() -> None:
    assert chat(nvext={"cache_salt": "a"}).salt == "a"
    assert chat(cache_salt="b", nvext={"cache_salt": "a"}).salt == "b"
    assert chat().salt == ""


def test_what_the_client_leaves_open_of_a_rendering_is_left_open() -> None:
    assert chat().template_options == {}
    assert chat(tools=[], reasoning_effort="low", continue_final_message=True).template_options == {
        "tools": [],
        "reasoning_effort": "low",
        "continue_final_message": True,
    }


def test_an_agent_reads_what_routers_tell_it() -> None:
    told = chat(prompt_token_ids=[1, 2], disaggregated_params={"request_type": "context_only"}, logits_processors=["a"])
    assert (told.computed_ids(), bytes(told.disaggregated_params)) == (
        pack_tokens([1, 2]),
        b'{"request_type": "context_only"}',
    )
    assert told.logits_processors == ["a"]


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], 7])
def test_a_computed_prompt_is_token_ids(ids: Any) -> None:
    with pytest.raises(RequestInvalid, match=r"^prompt_token_ids"):
        chat(prompt_token_ids=ids).computed_ids()
