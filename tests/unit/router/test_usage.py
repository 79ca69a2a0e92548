"""The count is found wherever the answer is cut, and only where it is one."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.usage import UsageReader, WholeEvents


def usage(cached_tokens: Any, **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": 1234,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": cached_tokens} | more,
    }


WHOLE = json.dumps({"id": "c", "choices": [{"text": "words"}], "usage": usage(1184)}).encode()
TERSE = json.dumps({"choices": [{"text": "words"}], "usage": usage(7)}, separators=(",", ":")).encode()
STREAM = (
    b"".join(
        b"data: " + json.dumps(event).encode() + b"\n\n"
        for event in ({"choices": [{"text": "a"}], "usage": None}, {"choices": [], "usage": usage(4294967295)})
    )
    + b"data: [DONE]\n\n"
)
ANSWERS = [(WHOLE, 1184), (TERSE, 7), (STREAM, 4294967295)]


def count(*chunks: bytes) -> int | None:
    reader = UsageReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.cached_tokens


@pytest.mark.parametrize(("answer", "expected"), ANSWERS, ids=["whole", "terse", "stream"])
def test_cut_at_any_byte_the_count_is_the_same(answer: bytes, expected: int) -> None:
    assert count(answer) == expected
    for cut in range(len(answer) + 1):
        assert count(answer[:cut], answer[cut:]) == expected


@pytest.mark.parametrize(("answer", "expected"), ANSWERS, ids=["whole", "terse", "stream"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 63, 64, 65])
def test_fed_in_small_pieces_the_count_is_the_same(answer: bytes, expected: int, size: int) -> None:
    assert count(*[answer[at : at + size] for at in range(0, len(answer), size)]) == expected


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cut_anywhere_any_number_of_times_the_count_is_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert count(*[STREAM[start:end] for start, end in pairwise(edges)]) == 4294967295


def test_of_several_counts_the_last_one_holds() -> None:
    assert count(b'"cached_tokens": 1 ... "cached_tokens": 22 ... ', b'"cached_tokens": 3') == 3


def test_0_is_a_count() -> None:
    assert count(WHOLE.replace(b"1184", b"0")) == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        WHOLE.replace(b"1184", b"null"),
        json.dumps({"choices": [{"text": 'the "cached_tokens": 5 are'}], "usage": None}).encode(),
        json.dumps({"choices": [{"text": json.dumps(usage(5))}]}).encode(),
        b'{"cached_tokens_details": 5}',
    ],
)
def test_where_no_count_is_there_is_none(answer: bytes) -> None:
    assert count(answer) is None
    assert count(*[answer[at : at + 1] for at in range(len(answer))]) is None


def test_before_anything_was_read_there_is_none() -> None:
    assert UsageReader().cached_tokens is None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_only_whole_events_are_passed_on_and_all_of_them(end: bytes, size: int) -> None:
    stream = end.join([b"data: one", b"data: two", b"data: three", b""])
    events, passed = WholeEvents(), b""
    for at in range(0, len(stream), size):
        passed += events.push(stream[at : at + size])
        assert passed == b"" or passed.endswith(end)
    assert passed == stream
    assert events.flush() == b""


def test_what_follows_the_last_event_comes_at_the_streams_own_end() -> None:
    events = WholeEvents()
    assert events.push(b"data: one\n\ndata: tw") == b"data: one\n\n"
    assert events.flush() == b"data: tw"


def test_bytes_without_events_are_not_held_for_ever() -> None:
    events = WholeEvents()
    assert events.push(b"x" * WholeEvents.HELD_BYTES_MAX) == b""
    assert len(events.push(b"x")) == WholeEvents.HELD_BYTES_MAX + 1
