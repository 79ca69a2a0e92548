"""One request to two pools: what each is asked, what goes from one to the other, what the client gets of it."""

from typing import Any

import msgspec
import pytest

from kv_protocol.openai.requests import decode_inbound
from router.request.handoff import AnswerUnusable, as_events, decode_body, prefill_answer, prefill_body

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hé"}],
    "max_completion_tokens": 50,
    "min_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
}
PARAMS = {"request_type": "context_only", "first_gen_tokens": [7], "ctx_request_id": 12, "encoded_opaque_state": "AAE="}


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a", "refusal": None},
        "finish_reason": "length",
        "disaggregated_params": PARAMS,
    } | changes
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


def test_the_prefill_pool_is_asked_for_one_token_of_its_context() -> None:
    asked = msgspec.json.decode(prefill_body(encoded(CHAT)))
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "hé"}],
        "temperature": 0.5,
        "min_tokens": 1,
        "stream": False,
        "max_tokens": 1,
        "disaggregated_params": {"request_type": "context_only"},
    }


def test_what_is_not_rewritten_passes_byte_for_byte() -> None:
    body = b'{"model":"m", "prompt": "\\u00e9 x", "temperature":1.50, "seed": 12345678901234567890}'
    for asked in (prefill_body(body), decode_body(body, encoded(PARAMS))):
        for part in (b'"\\u00e9 x"', b"1.50", b"12345678901234567890"):
            assert part in asked


def test_the_decode_pool_is_asked_what_the_client_asked_with_what_the_prefill_pool_said() -> None:
    params = prefill_answer(encoded(answer()), limit_tokens=50).params
    asked = msgspec.json.decode(decode_body(encoded(CHAT), params))
    known = {"request_type": "generation_only", "ctx_usage": answer()["usage"]}
    assert asked == CHAT | {"disaggregated_params": PARAMS | known}


def test_pins_go_to_the_pool_whose_workers_they_name() -> None:
    nvext = {
        "backend_instance_id": "d1", "dp_rank": 1, "prefill_worker_id": "p1", "prefill_dp_rank": 0, "cache_salt": "s",
    }  # fmt: skip
    body = encoded({"model": "m", "prompt": "x", "nvext": nvext})
    to_prefill = msgspec.json.decode(prefill_body(body))["nvext"]
    assert to_prefill == {"backend_instance_id": "p1", "dp_rank": 0, "cache_salt": "s"}
    to_decode = msgspec.json.decode(decode_body(body, b"{}"))["nvext"]
    assert to_decode == {"backend_instance_id": "d1", "dp_rank": 1, "cache_salt": "s"}
    other = {"decode_worker_id": "d1", "cache_salt": "s"}
    body = encoded({"model": "m", "prompt": "x", "nvext": other})
    assert msgspec.json.decode(prefill_body(body))["nvext"] == {"cache_salt": "s"}
    assert msgspec.json.decode(decode_body(body, b"{}"))["nvext"] == other
    body = encoded({"model": "m", "prompt": "x", "nvext": None})
    assert msgspec.json.decode(prefill_body(body))["nvext"] is None


def test_but_for_what_is_handed_over_routers_read_what_is_sent_to_them() -> None:
    for asked in (prefill_body(encoded(CHAT)), decode_body(encoded(CHAT), encoded(PARAMS))):
        body = {key: value for key, value in msgspec.json.decode(asked).items() if key != "disaggregated_params"}
        assert decode_inbound("/v1/chat/completions", encoded(body)).model == "m"


@pytest.mark.parametrize("reason", ["length", "not_finished"])
def test_an_answer_that_goes_on_has_params_and_is_not_final(reason: str) -> None:
    found = prefill_answer(encoded(answer(finish_reason=reason)), limit_tokens=None)
    assert not found.is_final
    assert msgspec.json.decode(found.params).keys() == PARAMS.keys() | {"ctx_usage"}


@pytest.mark.parametrize(("reason", "limit_tokens"), [("stop", 50), ("stop", None), ("length", 1), ("tool_calls", 9)])
def test_an_answer_that_is_whole_after_its_first_token_is_the_clients_without_what_was_handed_over(
    reason: str, limit_tokens: int | None
) -> None:
    found = prefill_answer(encoded(answer(finish_reason=reason)), limit_tokens=limit_tokens)
    assert (found.is_final, found.params) == (True, b"")
    expected = answer(finish_reason=reason)
    del expected["choices"][0]["disaggregated_params"]
    assert msgspec.json.decode(found.body) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "choices: found '{', allowed one choice with its finish_reason"),
        (b"[]", "choices: found '[]', allowed one choice with its finish_reason"),
        (b'{"choices":[]}', "allowed one choice with its finish_reason"),
        (encoded(answer() | {"choices": answer()["choices"] * 2}), "allowed one choice with its finish_reason"),
        (encoded(answer(disaggregated_params=None)), "choices[0].disaggregated_params: found None, allowed an object"),
        (encoded(answer(disaggregated_params=[1])), "choices[0].disaggregated_params: found [1], allowed an object"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_continued_says_why(body: bytes, message: str) -> None:
    with pytest.raises(AnswerUnusable) as raised:
        prefill_answer(body, limit_tokens=None)
    assert message in str(raised.value)


def events(stream: bytes) -> list[Any]:
    lines = stream.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_final_answer_becomes_the_event_stream_that_says_the_same() -> None:
    whole = msgspec.json.decode(prefill_answer(encoded(answer(finish_reason="stop")), limit_tokens=9).body)
    (event,) = events(as_events(encoded(whole), include_usage=False))
    assert event["object"] == "chat.completion.chunk"
    assert event["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": "a", "refusal": None}, "finish_reason": "stop"}
    ]
    assert "usage" not in event
    first, last = events(as_events(encoded(whole), include_usage=True))
    assert (first["choices"], last["choices"], last["usage"]) == (event["choices"], [], whole["usage"])


def test_a_completion_keeps_its_object_and_text() -> None:
    whole = {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    (event,) = events(as_events(encoded(whole), include_usage=False))
    assert event == whole
