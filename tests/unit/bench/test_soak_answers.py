"""Answers of a soak: read wherever they are cut, and judged by what they must say."""

import json

import pytest

from bench.soak.answers import AnswerOutcome, AnswerReader, judged, judged_when_left
from bench.soak.requests import KINDS, REFUSED, Kind, SoakRequest

BY_NAME = {kind.name: kind for kind in (*KINDS, REFUSED)}
WHOLE, STREAM, TWO = BY_NAME["completion"], BY_NAME["completion, streamed"], BY_NAME["stream of two choices"]


def request(kind: Kind, *texts: str, status: int = 200) -> SoakRequest:
    return SoakRequest(kind, b"", texts, tokens=len(texts[0]) if texts else 0, status=status)


def framed(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} So", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*events: object) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = [f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode() for each in events]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in data) + b"0\r\n\r\n"


def said(text: str, index: int = 0, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]}


def usage(tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def answer(data: bytes, *, complete: bool = True) -> AnswerReader:
    reader = AnswerReader()
    assert reader.feed(data) is complete
    return reader


GOOD = chunked(said("ab"), said("c"), said("", finish_reason="length"), usage(3), "[DONE]")


@pytest.mark.parametrize("data", [GOOD, framed(200, b'{"some": "thing"}')], ids=["chunks", "length"])
def test_an_answer_is_read_wherever_it_is_cut(data: bytes) -> None:
    entire = answer(data)
    for cut in range(1, len(data)):
        reader = AnswerReader()
        assert [reader.feed(data[:cut]), reader.feed(data[cut:])] == [False, True], cut
        assert (reader.status, reader.payload, reader.events) == (200, entire.payload, entire.events), cut


def test_a_stream_is_right_with_its_text_reason_usage_and_end() -> None:
    assert judged(request(STREAM, "abc"), answer(GOOD)) is AnswerOutcome.RIGHT


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
    assert judged(request(STREAM, "abc"), answer(chunked(*events))) is AnswerOutcome.WRONG


def test_an_error_event_behind_the_right_beginning_is_an_honest_end() -> None:
    events = (said("ab"), {"error": {"message": "it died"}}, "[DONE]")
    assert judged(request(STREAM, "abc"), answer(chunked(*events))) is AnswerOutcome.ERROR_EVENT


def test_each_choice_is_compared_with_its_own_text() -> None:
    events = [said("a", 0), said("x", 1), said("b", 0, "length"), said("y", 1, "length"), usage(4), "[DONE]"]
    assert judged(request(TWO, "ab", "xy"), answer(chunked(*events))) is AnswerOutcome.RIGHT
    assert judged(request(TWO, "ab", "yx"), answer(chunked(*events))) is AnswerOutcome.WRONG


def test_a_whole_answer_is_compared_too() -> None:
    body = json.dumps(usage(3) | said("abc", finish_reason="length")).encode()
    assert judged(request(WHOLE, "abc"), answer(framed(200, body))) is AnswerOutcome.RIGHT
    assert judged(request(WHOLE, "abd"), answer(framed(200, body))) is AnswerOutcome.WRONG


def test_a_refusal_is_due_only_with_the_status_that_the_request_deserves() -> None:
    error = b'{"error": {"message": "max_tokens: found -1"}}'
    bad = request(REFUSED, status=400)
    assert judged(bad, answer(framed(400, error))) is AnswerOutcome.REFUSED
    assert judged(bad, answer(framed(404, error))) is AnswerOutcome.FAILED
    assert judged(bad, answer(framed(400, b"{}"))) is AnswerOutcome.WRONG
    assert judged(request(WHOLE, "abc"), answer(framed(400, error))) is AnswerOutcome.FAILED


def test_what_came_before_a_client_left_must_be_right() -> None:
    for text, outcome in {"ab": AnswerOutcome.LEFT, "ax": AnswerOutcome.WRONG}.items():
        begun = answer(chunked(said(text), said("c"))[:-20], complete=False)
        assert judged_when_left(request(STREAM, "abc"), begun) is outcome
