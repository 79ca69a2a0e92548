"""An answer's own counts of tokens, read at its end."""

import json

import pytest

from router.http.usage import Usage, usage_in

USAGE = {"prompt_tokens": 64, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 48}}


def test_a_whole_answer_says_what_it_had() -> None:
    body = json.dumps({"choices": [{"text": "hello"}], "usage": USAGE}).encode()
    assert usage_in(body) == Usage(7, 48, 64)
    assert usage_in(body.replace(b" ", b"")) == Usage(7, 48, 64)


def test_a_stream_says_it_in_its_last_event_but_one() -> None:
    event = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    assert usage_in(b'data: {"choices": []}\n\n' + event + b"data: [DONE]\n\n") == Usage(7, 48, 64)


def test_of_several_counts_the_last_one_holds() -> None:
    first = json.dumps({"usage": USAGE | {"completion_tokens": 1}}).encode()
    assert usage_in(first + json.dumps({"usage": USAGE}).encode()) == Usage(7, 48, 64)


def test_a_response_and_embeddings_say_it_in_words_of_their_own() -> None:
    details = {"input_tokens_details": {"cached_tokens": 48}, "output_tokens_details": {"reasoning_tokens": 3}}
    response = {"usage": {"input_tokens": 64, "output_tokens": 7, "total_tokens": 71, **details}}
    assert usage_in(json.dumps(response).encode()) == Usage(7, 48, 64)
    assert usage_in(b'{"data":[],"usage":{"prompt_tokens":12,"total_tokens":12}}') == Usage(None, None, 12)


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        (b"", Usage(None, None)),
        (b"data: [DONE]\n\n", Usage(None, None)),
        (b'{"usage": null}', Usage(None, None)),
        (b'{"usage": {"completion_tokens": 3}}', Usage(3, None)),
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}', Usage(None, 0)),
        (b'"cached_tokens": 9}}', Usage(None, None)),
        (b'{"usage": {"completion_tokens": -1}}', Usage(None, None)),
        (b'{"usage": {"completion_tokens": 99999999999}}', Usage(None, None)),
    ],
)
def test_what_is_not_said_is_not_known(tail: bytes, found: Usage) -> None:
    assert usage_in(tail) == found
