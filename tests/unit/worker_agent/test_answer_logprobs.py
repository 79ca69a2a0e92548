"""Log probabilities in the shapes of the OpenAI interface."""

import math
from typing import Any

import msgspec
import pytest

from kv_runtime.text.byte_model import ByteText
from worker_agent.api.answers import chat_logprobs, completion_logprobs, prompt_logprobs
from worker_agent.api.choice_text import TokenSpan
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs

BYTES = ByteText().token_bytes
A, B, HALF = (TokenLogprob(token_id=token, logprob=-token / 100, rank=1) for token in (97, 98, 0xE2))


def place(chosen: TokenLogprob, *top: TokenLogprob, start: int = 0) -> TokenSpan:
    return TokenSpan(chosen.token_id, start, TokenLogprobs(chosen=chosen, top=top))


def read(told: object) -> Any:
    """Return it as a client reads it."""
    return msgspec.json.decode(msgspec.json.encode(told))


def test_each_place_is_encoded_by_itself() -> None:
    told, places = TokenLogprobs(chosen=B, top=(A,)), [place(B, A), place(A)]
    encoded = (
        chat_logprobs(places, BYTES)["content"],
        completion_logprobs(places, BYTES)["top_logprobs"],
        prompt_logprobs((97, 98, 99), (told, told, told), BYTES)[1:],
    )
    assert [[type(each) for each in column] for column in encoded] == [[msgspec.Raw] * 2] * 3


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
    assert read(prompt_logprobs((97, 98, 99), (told, told), BYTES)) == [
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
