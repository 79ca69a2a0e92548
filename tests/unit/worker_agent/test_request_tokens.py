"""Tokens that a request names: what stops it, what is likelier, what is not to come."""

from typing import Any

import pytest

from kv_protocol.openai.requests import RequestInvalid
from kv_runtime.text.byte_model import ByteText
from tests.unit.worker_agent.test_request_rules import completion
from worker_agent.api.request_rules import (
    BAD_WORDS_MAX,
    BIASES_MAX,
    STOP_TOKENS_MAX,
    bad_token_ids_of,
    logit_bias_of,
    stop_token_ids_of,
)

TEXT = ByteText()
(END,) = TEXT.eos_ids


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, (END,)),
        ({"stop_token_ids": [4, 3, 4]}, (4, 3, END)),
        ({"stop_token_ids": [END]}, (END,)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [3]}, (3,)),
    ],
)
def test_the_client_s_stop_tokens_stop_and_the_model_s_unless_they_are_ignored(
    fields: dict[str, Any], tokens: tuple[int, ...]
) -> None:
    assert stop_token_ids_of(completion(**fields), TEXT.eos_ids) == tokens


def test_biases_are_pairs_of_token_and_number() -> None:
    assert logit_bias_of(completion(), TEXT) == ()
    assert logit_bias_of(completion(logit_bias={"7": -100, "0": 1.5}), TEXT) == ((7, -100.0), (0, 1.5))


def test_a_bad_word_is_its_token() -> None:
    assert bad_token_ids_of(completion(), TEXT) == ()
    assert bad_token_ids_of(completion(bad_words=["a", " ", "a"]), TEXT) == (97, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [1] * (STOP_TOKENS_MAX + 1)}, "stop_token_ids: found"),
        ({"logit_bias": {"9999999999": 1}}, r"logit_bias: found \"9999999999\", allowed tokens 0\.\.262"),
        ({"logit_bias": {"263": 1}}, 'logit_bias: found "263"'),
        ({"logit_bias": {str(at): 1 for at in range(BIASES_MAX + 1)}}, 'logit_bias: found "1025 tokens"'),
        ({"bad_words": ["a", "ab"]}, r"bad_words\[1\]: found \"ab\", allowed a word of one token: it has 2"),
        ({"bad_words": ["a"] * (BAD_WORDS_MAX + 1)}, "bad_words: found"),
    ],
)
def test_what_names_no_token_is_refused(fields: dict[str, Any], message: str) -> None:
    asked = completion(**fields)
    with pytest.raises(RequestInvalid, match=message) as refused:
        (stop_token_ids_of(asked, ()), logit_bias_of(asked, TEXT), bad_token_ids_of(asked, TEXT))
    assert len(str(refused.value)) < 300
