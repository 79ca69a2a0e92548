"""An answer's own counts of tokens, read at its end."""

import json

import pytest

from router.native import built

USAGE = {"prompt_tokens": 64, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 48}}


def usage_in(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """Return the output, cached and input tokens of an answer that ends so."""
    answer = built.answer_of(tail, {}, is_streamed=False, has_begun=False)
    return answer.output_tokens, answer.cached_tokens, answer.input_tokens


def test_a_whole_answer_says_what_it_had() -> None:
    body = json.dumps({"choices": [{"text": "hello"}], "usage": USAGE}).encode()
    assert usage_in(body) == (7, 48, 64)
    assert usage_in(body.replace(b" ", b"")) == (7, 48, 64)


def test_a_stream_says_it_in_its_last_event_but_one() -> None:
    event = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    assert usage_in(b'data: {"choices": []}\n\n' + event + b"data: [DONE]\n\n") == (7, 48, 64)


def test_of_several_counts_the_last_one_holds() -> None:
    first = json.dumps({"usage": USAGE | {"completion_tokens": 1}}).encode()
    assert usage_in(first + json.dumps({"usage": USAGE}).encode()) == (7, 48, 64)


def test_what_stands_before_the_last_usage_does_not_hold() -> None:
    first, last = ({"usage": USAGE}, {"usage": {"prompt_tokens": 64, "completion_tokens": 7}})
    assert usage_in(json.dumps(first).encode() + json.dumps(last).encode()) == (7, None, 64)


def test_a_response_and_embeddings_say_it_in_words_of_their_own() -> None:
    details = {"input_tokens_details": {"cached_tokens": 48}, "output_tokens_details": {"reasoning_tokens": 3}}
    response = {"usage": {"input_tokens": 64, "output_tokens": 7, "total_tokens": 71, **details}}
    assert usage_in(json.dumps(response).encode()) == (7, 48, 64)
    assert usage_in(b'{"data":[],"usage":{"prompt_tokens":12,"total_tokens":12}}') == (None, None, 12)


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        (b"", (None, None, None)),
        (b"data: [DONE]\n\n", (None, None, None)),
        (b'{"usage": null}', (None, None, None)),
        (b'{"usage": {"completion_tokens": 3}}', (3, None, None)),
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}', (None, 0, None)),
        (b'"cached_tokens": 9}}', (None, None, None)),
        (b'{"usage": {"completion_tokens": -1}}', (None, None, None)),
        (b'{"usage": {"completion_tokens": 99999999999}}', (None, None, None)),
    ],
)
def test_what_is_not_said_is_not_known(tail: bytes, found: tuple[int | None, ...]) -> None:
    assert usage_in(tail) == found
