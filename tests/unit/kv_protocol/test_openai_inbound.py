"""What the router reads of a request, what it leaves to the worker, and how what may not be is named."""

import json
from typing import Any

import msgspec
import pytest

from kv_protocol.openai.inbound import CHANGING_KEYS
from kv_protocol.openai.option_table import CACHE_SALT_CHARACTERS_MAX, NO_TARGETS, AgentHints, NvExt, Targets
from kv_protocol.openai.requests import (
    CHAT,
    COMPLETIONS,
    ChatInbound,
    CompletionInbound,
    RequestInvalid,
    decode_chat,
    decode_inbound,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatInbound:
    inbound = decode_inbound(CHAT, json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())
    assert isinstance(inbound, ChatInbound)
    return inbound


def completion(**fields: Any) -> CompletionInbound:
    inbound = decode_inbound(COMPLETIONS, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())
    assert isinstance(inbound, CompletionInbound)
    return inbound


def test_what_routing_needs_is_read() -> None:
    inbound = chat(stream=True, stream_options={"include_usage": True}, max_tokens=5, n=2, cache_salt="s", priority=0.5)
    assert (inbound.model, inbound.stream, inbound.include_usage, inbound.limit_tokens) == ("m", True, True, 5)
    assert (inbound.n, inbound.salt, inbound.priority, inbound.path) == (2, "s", 0.5, CHAT)
    assert chat(max_completion_tokens=6).limit_tokens == 6
    assert (completion().limit_tokens, completion().include_usage, completion().path) == (None, False, COMPLETIONS)


def test_messages_and_tools_stay_bytes_until_they_are_read() -> None:
    inbound = decode_inbound(CHAT, b'{"model":"m","messages":[ {"role":"user", "content":7} ],"tools":[{"a":1}]}')
    assert isinstance(inbound, ChatInbound)
    assert bytes(inbound.messages) == b'[ {"role":"user", "content":7} ]'
    assert inbound.read_messages() == [{"role": "user", "content": 7}]
    assert inbound.read_options() == {"tools": [{"a": 1}]}


def test_a_value_that_is_not_of_its_type_is_left_to_the_worker_and_all_others_are_read() -> None:
    inbound = chat(max_tokens=0, n="two", stream="yes", stop={}, reasoning_effort=7, cache_salt="s", typo=[1])
    assert (inbound.limit_tokens, inbound.n, inbound.stream, inbound.stop) == (None, None, None, None)
    assert (inbound.salt, inbound.read_messages()) == ("s", MESSAGES)


def test_long_messages_are_read_as_short_ones() -> None:
    for text in ('é😀\n"\\/\x7f\0', "[{}]"):
        messages = [{"role": "user", "content": text * 2000, "parts": [1, 2.5, None, True, {text: -1}]}]
        assert chat(messages=messages).read_messages() == messages
    with pytest.raises(RequestInvalid, match="UTF-16 surrogates in pairs"):
        chat(messages=[{"content": "\ud800" * 2000}]).read_messages()


def test_messages_that_are_no_list_of_objects_are_refused_by_their_place() -> None:
    for messages, field in (
        (7, "messages"),
        ([], "messages"),
        ([7], "messages[0]"),
        ([{}] * 3000 + [7], "messages[3000]"),
    ):
        with pytest.raises(RequestInvalid) as refused:
            chat(messages=messages).read_messages()
        assert refused.value.field == field, messages


def test_of_a_chat_without_uncommon_keys_each_question_about_them_has_one_answer() -> None:
    plain = chat(stream=True, max_tokens=5, temperature=0.5, stop="x")
    assert (plain.token_data(), plain.salt, plain.changed_by, plain.read_options()) == (None, "", "", {})
    assert (plain.names_phase, plain.has_one_choice, plain.ineffective) == (False, True, ())
    assert (plain.is_guided, plain.targets) == (False, NO_TARGETS)


def test_what_changes_a_chat_in_the_engine_is_named() -> None:
    for key in CHANGING_KEYS:
        assert (chat(**{key: True}).changed_by, chat(**{key: None}).changed_by) == (key, "")


def test_special_tokens_change_a_chat_and_belong_to_a_completion() -> None:
    assert [completion(add_special_tokens=each).changed_by for each in (True, False)] == ["", ""]
    assert chat(add_special_tokens=False).changed_by == ""


def test_a_list_of_prompts_has_several_choices() -> None:
    for prompt, has_one in (("a", True), ([1, 2], True), (["a"], False), ([[1], [2]], False)):
        assert completion(prompt=prompt).has_one_choice is has_one
        assert not completion(prompt=prompt, n=2).has_one_choice


def test_what_may_not_be_is_named_by_its_path() -> None:
    cases: dict[str, dict[str, Any]] = {
        "kv_prompt_ids": {"kv_prompt_ids": "AAAA"},
        "kv_continue": {"kv_continue": {}},
        "model": {"model": 7},
        "nvext": {"nvext": 7},
        "nvext.agent_hints.osl": {"nvext": {"agent_hints": {"osl": 0}}},
        "nvext.agent_hints.strict_priority": {"nvext": {"agent_hints": {"strict_priority": -1}}},
        "nvext.router.ttft_target": {"nvext": {"router": {"ttft_target": "1s"}}},
        "nvext.dp_rank": {"nvext": {"dp_rank": -1}},
        "nvext.annotations[0]": {"nvext": {"annotations": [7]}},
    }
    for path, fields in cases.items():
        with pytest.raises(RequestInvalid) as refused:
            chat(**fields)
        assert refused.value.field == path


def test_a_cache_salt_of_1024_characters_is_read_and_a_longer_one_is_refused_by_its_path() -> None:
    def body(place: str, salt: str) -> bytes:
        fields: dict[str, Any] = {"cache_salt": salt}
        fields = fields if place == "cache_salt" else {"nvext": fields}
        return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()

    for place in ("cache_salt", "nvext.cache_salt"):
        for character in "sé😀":
            longest = character * CACHE_SALT_CHARACTERS_MAX
            salted = body(place, longest)
            assert decode_inbound(CHAT, salted).salt == decode_chat(salted).salt == longest
            with pytest.raises(RequestInvalid, match="a string, up to 1024 characters") as refused:
                decode_chat(body(place, longest + "s"))
            assert refused.value.field == place


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/route"])
def test_a_body_that_is_not_utf_8_is_refused_also_where_the_router_reads_nothing(path: str) -> None:
    prompt = b'"prompt":"x"' if path == COMPLETIONS else b'"messages":[{"role":"user","content":"hi"}]'
    body = b'{"model":"m",%b,"user":"%b"}'
    assert decode_inbound(path, body % (prompt, "é😀".encode())).model == "m"
    with pytest.raises(RequestInvalid, match=r"body: found byte 0xff at \d+, allowed UTF-8"):
        decode_inbound(path, body % (prompt, b"\xff"))


AFTER_WRONG = [b'{"model":"m","n":"x",', b'{"model":"m","n":"x","a":' + b"[" * 100_000]
"""Bodies that are no JSON behind a value of the wrong type."""


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[1]", b"\xff", b"[" * 100_000, b'{"model":"m","messages":' + b"[" * 100_000, *AFTER_WRONG],
    ids=["empty", "cut", "null", "array", "bytes", "deep", "deep field", "cut later", "deep later"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/route"])
def test_what_is_no_request_is_refused_whatever_it_is(body: bytes, path: str) -> None:
    with pytest.raises(RequestInvalid):
        decode_inbound(path, body)


def test_a_body_says_itself_for_which_endpoint_it_is_where_the_path_does_not() -> None:
    assert decode_inbound("/v1/route", b'{"model":"m","messages":[]}').path == CHAT
    assert decode_inbound("/v1/route", b'{"model":"m","prompt":"x"}').path == COMPLETIONS


# ---------------------------------------------------------------- nvext

EXTENSION = {
    "backend_instance_id": "w1",
    "prefill_worker_id": 7,
    "decode_worker_id": "w2",
    "dp_rank": 1,
    "prefill_dp_rank": 0,
    "token_data": [1, 2],
    "cache_salt": "s",
    "agent_hints": {"priority": -3, "strict_priority": 2, "osl": 100, "speculative_prefill": True},
    "router": {"ttft_target": 250, "itl_target": 12.5},
    "annotations": ["a"],
    "extra_fields": ["timing"],
    "greed_sampling": True,
    "use_raw_prompt": True,
    "max_thinking_tokens": 10,
}


def test_an_extension_that_says_nothing_is_none() -> None:
    silent: list[Any] = [None, {}, {"agent_hints": None, "router": None, "token_data": None}, {"router": {}}]
    for nvext in silent:
        inbound = chat(nvext=nvext)
        assert (inbound.extension.hints, inbound.targets) == (AgentHints(), Targets())
        assert (inbound.token_data(), inbound.salt, inbound.ineffective) == (None, "", ())


def test_keys_without_effect_are_told_by_their_paths() -> None:
    assert chat(priority=1, nvext={"dp_rank": 0}).ineffective == ()
    names = ("annotations", "extra_fields", "greed_sampling", "max_thinking_tokens", "use_raw_prompt")
    ineffective = ("nvext.agent_hints.speculative_prefill", *(f"nvext.{name}" for name in names))
    assert chat(user="u", nvext=EXTENSION).ineffective == ineffective


def test_every_key_of_the_extension_is_tried_here() -> None:
    assert {field.encode_name for field in msgspec.structs.fields(NvExt)} == set(EXTENSION)
