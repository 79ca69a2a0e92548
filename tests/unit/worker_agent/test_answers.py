"""Answers as OpenAI clients read them."""

import math
from typing import Any

import msgspec
import pytest

from kv_protocol.openai.requests import ChatRequest, CompletionRequest
from kv_runtime.text.byte_model import ByteText
from worker_agent.api.answers import CompletionAnswer, chat_logprobs, completion_logprobs, prompt_logprobs, usage
from worker_agent.api.choice_text import Piece, TokenSpan
from worker_agent.api.parsers.calls import ContentDelta
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs

CREATED = 1_700_000_000


def chat(**fields: Any) -> CompletionAnswer:
    return CompletionAnswer(ChatRequest(model="m", messages=[], **fields), "7", CREATED, lambda token: bytes((token,)))


def completion(**fields: Any) -> CompletionAnswer:
    return CompletionAnswer(
        CompletionRequest(model="m", prompt=msgspec.Raw(b'"hi"'), **fields), "7", CREATED, lambda token: bytes((token,))
    )


CHAT, COMPLETION = chat(), completion()
USAGE = usage(10, 3, 8)
SPAN = TokenSpan(97, 0, TokenLogprobs(chosen=TokenLogprob(token_id=97, logprob=-0.5, rank=1)))
TOLD_IN_CHAT = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def data_of(event: bytes) -> dict[str, Any]:
    """Return the JSON of exactly one server-sent event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[6:-2]
    decoded: dict[str, Any] = msgspec.json.decode(event[6:-2])
    return decoded


def events_of(events: bytes) -> list[dict[str, Any]]:
    return [data_of(event + b"\n\n") for event in events.split(b"\n\n")[:-1]]


def chat_chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-7",
        "created": CREATED,
        "model": "m",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }


def completion_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": "cmpl-7",
        "created": CREATED,
        "model": "m",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}],
    }


# -------------------------------------------------------------------- answers
def test_a_chat_s_stream_opens_with_the_role_of_each_choice_and_a_completion_s_with_nothing() -> None:
    assert data_of(CHAT.opening()) == chat_chunk({"role": "assistant", "content": ""})
    choices = [event["choices"][0] for event in events_of(chat(n=3).opening())]
    assert [(each["index"], each["delta"]["role"]) for each in choices] == [(at, "assistant") for at in range(3)]
    assert COMPLETION.opening() == b""


def piece_of(text: str, **fields: Any) -> Piece:
    return Piece(events=(ContentDelta(text),) if text else (), **fields)


@pytest.mark.parametrize("text", ["hi", "", "two\nlines\r\n", 'quote " and \\', "\u2028 é 😀"])
def test_text_goes_out_as_one_event_whatever_is_in_it(text: str) -> None:
    assert data_of(CHAT.events(piece_of(text), always=True)) == chat_chunk({"content": text})
    assert data_of(COMPLETION.events(piece_of(text), always=True)) == completion_chunk(text)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_closes_with_the_reason(reason: str) -> None:
    assert data_of(CHAT.events(Piece(finish_reason=reason))) == chat_chunk({}, reason)
    assert data_of(COMPLETION.events(Piece(finish_reason=reason))) == completion_chunk("", reason)


@pytest.mark.parametrize("answer", [CHAT, COMPLETION])
def test_a_piece_of_nothing_is_no_event_unless_it_is_to_show_life(answer: CompletionAnswer) -> None:
    assert answer.events(Piece()) == b""
    assert len(events_of(answer.events(Piece(), always=True))) == 1
    assert len(events_of(answer.events(piece_of("a", finish_reason="stop")))) == 2


@pytest.mark.parametrize("answer", [CHAT, COMPLETION])
def test_the_usage_comes_in_an_event_of_its_own_without_choices(answer: CompletionAnswer) -> None:
    opened = data_of(answer.events(piece_of("x"), always=True))
    (usage_event,) = events_of(answer.ending(USAGE, include_usage=True).removesuffix(b"data: [DONE]\n\n"))
    assert usage_event == {**opened, "choices": [], "usage": USAGE}


def test_the_end_of_a_stream_and_an_error_in_it() -> None:
    assert CHAT.ending(USAGE, include_usage=False) == b"data: [DONE]\n\n"
    assert CHAT.failed("why", b'{"error":{}}') == b'data: {"error":{}}\n\n'


# -------------------------------------------------------------------- log probabilities
def test_log_probabilities_go_with_the_text_of_their_tokens() -> None:
    piece = piece_of("a", spans=(SPAN,), finish_reason="stop")
    delta, closing = events_of(CHAT.events(piece))
    told = delta["choices"][0]
    assert (told["logprobs"], told["finish_reason"]) == ({"content": [TOLD_IN_CHAT], "refusal": None}, None)
    assert closing["choices"][0]["logprobs"] is None
    whole = msgspec.json.decode(COMPLETION.full_body([piece], USAGE))["choices"][0]
    assert whole["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5}],
        "text_offset": [0],
    }


def test_what_is_told_of_the_prompt_stands_where_each_interface_has_it() -> None:
    expected = [None, {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
    piece = Piece(finish_reason="stop", prompt_logprobs=(SPAN.logprobs, SPAN.logprobs))
    assert msgspec.json.decode(CHAT.full_body([piece], USAGE))["prompt_logprobs"] == expected
    completed = msgspec.json.decode(COMPLETION.full_body([piece], USAGE))
    assert completed["choices"][0]["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in completed


# -------------------------------------------------------------------- a prefill worker's answers
HANDED_OVER = Piece(
    events=(ContentDelta("a"),),
    finish_reason="length",
    prompt=(5, 6),
    handoff=Handoff(
        request_type="context_only",
        first_gen_tokens=(97,),
        opaque_state=b"\xff",
        multimodal_embedding_handles=({"a": 1},),
        multimodal_hashes=((1,) * 8,),
    ),
)
HANDOFF = {"request_type": "context_only", "first_gen_tokens": [97], "encoded_opaque_state": "/w=="}


@pytest.mark.parametrize("answer", [CHAT, COMPLETION])
def test_what_the_next_worker_needs_stands_in_the_choice(answer: CompletionAnswer) -> None:
    whole = msgspec.json.decode(answer.full_body([HANDED_OVER], USAGE))
    assert (whole["choices"][0]["disaggregated_params"], whole["prompt_token_ids"]) == (HANDOFF, [5, 6])


@pytest.mark.parametrize("answer", [CHAT, COMPLETION])
def test_a_stream_says_it_once_where_it_says_the_reason(answer: CompletionAnswer) -> None:
    delta, closing = events_of(answer.events(HANDED_OVER))
    assert (closing["choices"][0]["disaggregated_params"], closing["prompt_token_ids"]) == (HANDOFF, [5, 6])
    assert "disaggregated_params" not in delta["choices"][0]
    assert "prompt_token_ids" not in delta


def test_any_other_answer_has_neither() -> None:
    whole = msgspec.json.decode(CHAT.full_body([Piece(finish_reason="stop")], USAGE))
    assert set(whole) == {"id", "created", "model", "object", "choices", "usage"}
    assert set(whole["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}


# -------------------------------------------------------------------- the shapes of log probabilities
BYTES = ByteText().token_bytes
A, B, HALF = (TokenLogprob(token_id=token, logprob=-token / 100, rank=1) for token in (97, 98, 0xE2))


def place(chosen: TokenLogprob, *top: TokenLogprob, start: int = 0) -> TokenSpan:
    return TokenSpan(chosen.token_id, start, TokenLogprobs(chosen=chosen, top=top))


def read(told: object) -> Any:
    """Return it as a client reads it."""
    return msgspec.json.decode(msgspec.json.encode(told))


def test_a_chat_tells_each_token_with_its_bytes_and_the_likeliest() -> None:
    a = {"token": "a", "logprob": -0.97, "bytes": [97]}
    b = {"token": "b", "logprob": -0.98, "bytes": [98]}
    half = {"token": "\ufffd", "logprob": -2.26, "bytes": [0xE2], "top_logprobs": []}
    assert read(chat_logprobs([place(B, A, B), place(HALF)], BYTES)) == {
        "content": [{**b, "top_logprobs": [a, b]}, half],
        "refusal": None,
    }


def test_a_completion_tells_columns_with_the_chosen_token_among_the_top() -> None:
    assert read(completion_logprobs([place(B, A, start=3), place(A, start=4), place(HALF, start=5)], BYTES)) == {
        "tokens": ["b", "a", "bytes:\\xe2"],
        "token_logprobs": [-0.98, -0.97, -2.26],
        "top_logprobs": [{"a": -0.97, "b": -0.98}, {"a": -0.97}, {"bytes:\\xe2": -2.26}],
        "text_offset": [3, 4, 5],
    }


def test_of_the_prompt_every_token_but_the_first_is_told() -> None:
    told = TokenLogprobs(chosen=B, top=(A,))
    assert read(prompt_logprobs((told, told, None), BYTES)) == [
        None,
        {
            "97": {"logprob": -0.97, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -0.98, "rank": 1, "decoded_token": "b"},
        },
        None,
    ]


def test_a_place_of_which_nothing_is_known_says_so() -> None:
    unknown = [TokenSpan(97, 0, None)]
    (content,) = read(chat_logprobs(unknown, BYTES))["content"]
    assert (content["token"], content["logprob"], content["top_logprobs"]) == ("a", -9999.0, [])
    told = read(completion_logprobs(unknown, BYTES))
    assert (told["token_logprobs"], told["top_logprobs"]) == ([None], [None])


def test_an_unknown_token_has_no_bytes() -> None:
    (content,) = read(chat_logprobs([place(TokenLogprob(token_id=9_999, logprob=-1.0))], BYTES))["content"]
    assert (content["token"], content["bytes"]) == ("", None)


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e9])
def test_what_is_no_probability_is_very_unlikely(logprob: float) -> None:
    broken = place(TokenLogprob(token_id=97, logprob=logprob))
    for told in (chat_logprobs([broken], BYTES), completion_logprobs([broken], BYTES)):
        assert b"-9999.0" in msgspec.json.encode(told)
