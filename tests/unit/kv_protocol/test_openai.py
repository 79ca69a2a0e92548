"""OpenAI requests, prompts of completions, and the end of a stream whose worker died: what is read and what is not."""

import json
from typing import Any

import msgspec
import pytest

from kv_protocol.continuation import DONE, Progress, progress_of, token_comment
from kv_protocol.hashing import pack_tokens
from kv_protocol.openai.parts import PROMPTS_MAX, read_ids, read_prompts
from kv_protocol.openai.requests import ChatRequest, RequestInvalid, decode_chat, decode_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({**CHAT, **fields}).encode())


def test_a_chat_field_that_may_not_be_is_named() -> None:
    cases: list[tuple[str, Any, str, str]] = [
        ("model", 7, "model", "found 7, allowed a string"),
        ("messages", [], "messages", "a list of objects, 1 or more items"),
        ("messages", [1], "messages[0]", "found 1"),
        ("stream_options", {"usage": True}, "stream_options.usage", "no others"),
        ("typo", 1, "typo", "no others"),
    ]
    for field, value, named, words in cases:
        with pytest.raises(RequestInvalid) as refused:
            chat(**{field: value})
        assert (refused.value.field, words in str(refused.value)) == (named, True), field


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[1]", b"\xff", b"[" * 100_000, b'{"model":"m","messages":[],"x":' + b"[" * 100_000],
    ids=["empty", "cut", "null", "array", "bytes", "deep", "deep field"],
)
@pytest.mark.parametrize("decode", [decode_chat, decode_completion])
def test_what_is_no_request_is_refused_whatever_it_is(body: bytes, decode: Any) -> None:
    with pytest.raises(RequestInvalid):
        decode(body)


def test_what_a_client_may_say_in_several_ways_is_one() -> None:
    assert (chat(stop="a").stops, chat(stop=["a", "b"]).stops, chat().stops) == (("a",), ("a", "b"), ())
    assert (chat(stream_options={"include_usage": True}).include_usage, chat().include_usage) == (True, False)
    assert chat(nvext={"cache_salt": "a"}).salt == "a"
    assert (chat(cache_salt="b", nvext={"cache_salt": "a"}).salt, chat().salt) == ("b", "")


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


def test_a_computed_prompt_is_token_ids() -> None:
    for ids in ([-1], [2**32], ["a"], 7):
        with pytest.raises(RequestInvalid, match=r"^prompt_token_ids"):
            chat(prompt_token_ids=ids).computed_ids()


CUT = Progress(tokens=bytes(8), id="a", created=1)


def ending(progress: Progress, *, is_chat: bool = True, prompt_tokens: int | None = 5) -> list[dict[str, Any]]:
    """Return the events before the last, which is the mark."""
    *events, mark = progress.ending("m", is_chat=is_chat, prompt_tokens=prompt_tokens).split(b"\n\n")[:-1]
    assert mark + b"\n\n" == DONE
    return [msgspec.json.decode(each.removeprefix(b"data: ")) for each in events]


def test_what_was_sent_already_is_not_sent_again() -> None:
    for has_usage, usage in ((True, []), (False, [7])):
        events = ending(msgspec.structs.replace(CUT, finish_reason="stop", has_usage=has_usage))
        assert [each["usage"]["total_tokens"] for each in events] == usage


def test_what_a_stream_has_sent_is_found_in_its_events() -> None:
    event = b'data: {"id":"a","created":1,"choices":[{"finish_reason":"stop"}],"usage":{"total_tokens":7}}\n\n'
    found = progress_of(token_comment([5, 6]) + event)
    assert found is not None
    assert (found.token_count, found.finish_reason, found.has_usage) == (2, "stop", True)
    assert ending(found) == []


MANY = list(range(90_000))


def raw(value: Any, **layout: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, **layout).encode())


def test_prompts_are_read_alone_or_in_a_list_in_their_order() -> None:
    assert read_prompts(raw("a")) == read_prompts(raw(["a"])) == ["a"]
    assert read_prompts(raw(["a", "b"])) == ["a", "b"]
    assert read_prompts(raw([[1], MANY, [3]])) == [pack_tokens(each) for each in ([1], MANY, [3])]
    for ids in ([1, 2], MANY):
        for layout in ({}, {"indent": 2}, {"separators": (",", ":")}):
            assert read_prompts(raw(ids, **layout)) == read_prompts(raw([ids], **layout)) == [pack_tokens(ids)]


@pytest.mark.parametrize(
    ("prompt", "field", "found"),
    [
        (["a", ""], "prompt[1]", 'found ""'),
        (["a"] * (PROMPTS_MAX + 1), "prompt", f"found {PROMPTS_MAX + 1} prompts, allowed at most {PROMPTS_MAX}"),
        ([], "prompt", "found []"),
        ([""], "prompt[0]", 'found ""'),
        ([[]], "prompt[0]", "found []"),
        ([["a"]], "prompt[0][0]", 'found "a"'),
        ([[[1]]], "prompt[0][0]", "found [1]"),
        ([1, "a"], "prompt[1]", 'found "a"'),
        ([1, None], "prompt[1]", "found null"),
        ([True], "prompt[0]", "found true"),
        ({"a": 1}, "prompt", 'found {"a": 1}'),
        (7, "prompt", "found 7"),
        ([*MANY, -1], "prompt[90000]", "found -1"),
        ([*MANY, "a", *MANY], "prompt[90000]", 'found "a"'),
        ([*MANY, [1, 2], *MANY], "prompt[90000]", "found [1, 2]"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_place(prompt: Any, field: str, found: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        read_prompts(raw(prompt))
    assert refused.value.field == field
    assert found in str(refused.value)


@pytest.mark.parametrize("ids", ["x" * 200_000, {"a": "x" * 200_000}, [[1, 2] * 50_000], 7, [], [1.5], None])
def test_what_is_no_list_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(RequestInvalid, match=r"^nvext\.token_data"):
        read_ids(raw(ids), "nvext.token_data")
