"""Answers of a soak, judged by what they must say."""

import json

import pytest

from bench.soak.clients import AnswerOutcome, SoakAnswer, judged, judged_when_left
from bench.soak.requests import KINDS, REFUSED, Kind, SoakRequest

BY_NAME = {kind.name: kind for kind in (*KINDS, REFUSED)}
WHOLE, STREAM, TWO = BY_NAME["completion"], BY_NAME["completion, streamed"], BY_NAME["stream of two choices"]


def request(kind: Kind, *texts: str, status: int = 200) -> SoakRequest:
    return SoakRequest(kind, texts=texts, tokens=len(texts[0]) if texts else 0, status=status)


def framed(status: int, body: bytes) -> SoakAnswer:
    found = SoakAnswer()
    found.status, found.payload = status, bytearray(body)
    return found


def chunked(*events: object) -> SoakAnswer:
    data = (f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode() for each in events)
    return framed(200, b"".join(data))


def said(text: str, index: int = 0, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]}


def usage(tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


GOOD = chunked(said("ab"), said("c"), said("", finish_reason="length"), usage(3), "[DONE]")


def test_a_stream_is_right_with_its_text_reason_usage_and_end() -> None:
    assert judged(request(STREAM, "abc"), GOOD) is AnswerOutcome.RIGHT


@pytest.mark.parametrize(
    "events",
    [
        (said("ab"), said("d"), said("", finish_reason="length"), usage(3), "[DONE]"),
        (said("ab"), said("c"), said("c", finish_reason="length"), usage(3), "[DONE]"),
        (said("abc"), usage(3), "[DONE]"),
        (said("abc", finish_reason="stop"), usage(3), "[DONE]"),
        (said("abc", finish_reason="length"), usage(2), "[DONE]"),
        (said("abc", finish_reason="length"), "[DONE]"),
        (said("abc", finish_reason="length"), usage(3)),
        (said("abd"), {"error": {"message": "it died"}}, "[DONE]"),
        (said("ab"), {"error": {"message": "it died"}}),
        ("{",),
    ],
    ids=["text", "twice", "no reason", "reason", "usage", "no usage", "no end", "error", "error, no end", "no JSON"],
)
def test_a_stream_that_says_something_else_is_wrong(events: tuple[object, ...]) -> None:
    assert judged(request(STREAM, "abc"), chunked(*events)) is AnswerOutcome.WRONG


def test_an_error_event_behind_the_right_beginning_is_an_honest_end() -> None:
    events = (said("ab"), {"error": {"message": "it died"}}, "[DONE]")
    assert judged(request(STREAM, "abc"), chunked(*events)) is AnswerOutcome.ERROR_EVENT


def test_each_choice_is_compared_with_its_own_text() -> None:
    events = [said("a", 0), said("x", 1), said("b", 0, "length"), said("y", 1, "length"), usage(4), "[DONE]"]
    assert judged(request(TWO, "ab", "xy"), chunked(*events)) is AnswerOutcome.RIGHT
    assert judged(request(TWO, "ab", "yx"), chunked(*events)) is AnswerOutcome.WRONG


def test_a_whole_answer_is_compared_too() -> None:
    body = json.dumps(usage(3) | said("abc", finish_reason="length")).encode()
    assert judged(request(WHOLE, "abc"), framed(200, body)) is AnswerOutcome.RIGHT
    assert judged(request(WHOLE, "abd"), framed(200, body)) is AnswerOutcome.WRONG


def test_a_refusal_is_due_only_with_the_status_that_the_request_deserves() -> None:
    error = b'{"error": {"message": "max_tokens: found -1"}}'
    bad = request(REFUSED, status=400)
    assert judged(bad, framed(400, error)) is AnswerOutcome.REFUSED
    assert judged(bad, framed(404, error)) is AnswerOutcome.FAILED
    assert judged(bad, framed(400, b"{}")) is AnswerOutcome.WRONG
    assert judged(request(WHOLE, "abc"), framed(400, error)) is AnswerOutcome.FAILED


def test_what_came_before_a_client_left_must_be_right() -> None:
    for text, outcome in {"ab": AnswerOutcome.LEFT, "ax": AnswerOutcome.WRONG}.items():
        begun = chunked(said(text), said("c"))
        del begun.payload[-20:]
        assert judged_when_left(request(STREAM, "abc"), begun) is outcome
