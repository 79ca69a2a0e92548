"""What we read in bytes, h11 reads too; what h11 reads and we refuse, we refuse on purpose."""

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.amount import examples
from tests.unit.properties.http_readers import (
    DELIBERATE,
    Reading,
    read_answer_by_h11,
    read_answer_by_us,
    read_by_h11,
    read_by_us,
)

REQUESTS = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions?x=y HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nhost:[::1]\r\ntransfer-encoding: CHUNKED\r\n\r\n3\r\nabc\r\n0A;x=y\r\n0123456789\r\n0\r\n\r\n",
    b"PUT /a HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\n\r\n0\r\nx-trailer: 1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nX: 1\r\nx:\t2 \r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
    b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
    b"OPTIONS /x HTTP/1.1\r\nhost: localhost\r\nempty:\r\nhigh: \xe4\xf6\r\n\r\n",
]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200\r\nserver: x\r\ntransfer-encoding: chunked\r\n\r\nA;a\r\ndata: x\n\n \r\n0\r\na: b\r\n\r\n",
    b"HTTP/1.0 500 It is so\r\nserver: x\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n",
]
HOSTILE = [
    b"\r", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b" ", b"\t", b":", b"\x00", b"\x0b", b"\x7f", b"\xff", b",", b";",
    b"0", b"1", b"a", b"_", b"+", b"-", b"0x", b"HTTP/1.0", b"HTTP/2.0", b"chunked", b"gzip", b"5, 5", b" folded\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: x\r\n",
    b"Host: b\r\n", b"Connection: close\r\n", b"0\r\n\r\n", b"5\r\n", b"ffffffffffffffff\r\n", b"GET / HTTP/1.1\r\n",
]  # fmt: skip

_BARE_LF = re.compile(rb"(?<!\r)\n")
_SPACE_BEFORE_EXTENSION = re.compile(rb"\r\n[0-9A-Fa-f]+[ \t]+;")
"""A recipient must accept it (RFC 9112, 7.1.1: BWS); h11 refuses it."""

spots = st.integers(0, 1 << 30)
cuts = st.lists(spots, max_size=6)


@st.composite
def spoilt(draw: st.DrawFn, corpus: list[bytes]) -> bytes:
    """One or two messages, some of whose bytes were taken out, doubled or replaced."""
    data = b"".join(draw(st.lists(st.sampled_from(corpus), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(spots) % (len(data) + 1)
        match draw(st.sampled_from(["insert", "insert", "replace", "remove", "double"])):
            case "insert":
                data = data[:at] + draw(st.sampled_from(HOSTILE)) + data[at:]
            case "replace":
                data = data[:at] + draw(st.sampled_from(HOSTILE)) + data[at + 1 :]
            case "remove":
                data = data[:at] + data[at + draw(st.integers(1, 20)) :]
            case _:
                data = data[:at] + data[max(0, at - draw(st.integers(1, 40))) :]
    return data


def pieces_of(data: bytes, places: list[int]) -> list[bytes]:
    """Return `data` in pieces, none of them empty."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def difference(data: bytes, ours: Reading, theirs: Reading) -> str:
    """Return what we read in `data` otherwise than h11, without what is done on purpose; empty where nothing is."""
    same = ours.messages == theirs.messages[: len(ours.messages)]
    if not same:
        if _SPACE_BEFORE_EXTENSION.search(data):
            return ""
        return f"we read {ours.messages}, h11 {theirs.messages}"
    if ours.refusal:
        if theirs.refusal and ours.messages == theirs.messages:
            return ""
        on_purpose = any(each in ours.refusal for each in DELIBERATE)
        return "" if on_purpose else f"we refuse ({ours.refusal}), h11 reads {theirs.messages}"
    if theirs.refusal:
        if ours.waits or _SPACE_BEFORE_EXTENSION.search(data):
            return ""
        return f"h11 refuses ({theirs.refusal}), and we do not"
    if ours.messages == theirs.messages or (ours.waits and _BARE_LF.search(data)):
        return ""  # for h11 a line, and so a head, may end with a bare LF: we wait for another end
    return f"h11 reads more: {theirs.messages}"


@pytest.mark.parametrize("data", [*REQUESTS, b"".join(REQUESTS[:4])])
def test_every_split_of_a_request_is_the_same_request_and_h11s(data: bytes) -> None:
    whole = read_by_us([data])
    assert whole.messages
    assert not whole.refusal
    assert whole == read_by_h11(data)
    assert whole == read_by_us([data[at : at + 1] for at in range(len(data))])
    for at in range(1, len(data)):
        assert read_by_us([data[:at], data[at:]]) == whole
        for after in range(at + 1, min(at + 12, len(data))):
            assert read_by_us([data[:at], data[at:after], data[after:]]) == whole


@pytest.mark.parametrize("data", ANSWERS)
def test_every_split_of_an_answer_is_the_same_answer_and_h11s(data: bytes) -> None:
    whole = read_answer_by_us([data])
    assert whole.messages
    assert whole == read_answer_by_h11(data)
    for at in range(1, len(data)):
        assert read_answer_by_us([data[:at], data[at:]]) == whole


@settings(max_examples=examples(400))
@given(spoilt(REQUESTS), cuts)
@example(REQUESTS[2].replace(b"0A;", b"0xA;"), [])
@example(REQUESTS[2].replace(b"\r\n3\r\n", b"\r\n+3\r\n"), [])
@example(REQUESTS[2].replace(b"0A;", b"123456789;"), [])
@example(REQUESTS[3].replace(b"x-trailer:", b"x trailer:"), [])
@example(REQUESTS[3].replace(b"x-trailer: 1", b"transfer-encoding: unchunked"), [])
@example(REQUESTS[3].replace(b"x-trailer: 1", b"Content-Length: 5, 6"), [])
@example(REQUESTS[1].replace(b"Content-Length:", b"Content-Length :"), [])
def test_spoilt_requests_are_read_as_h11_reads_them_or_refused_on_purpose(data: bytes, places: list[int]) -> None:
    ours = read_by_us([data])
    assert difference(data, ours, read_by_h11(data)) == ""
    assert read_by_us(pieces_of(data, places)) == ours, "however it is cut"


@settings(max_examples=examples(400))
@given(spoilt(ANSWERS), cuts)
@example(ANSWERS[2].replace(b"A;a", b"A ;a"), [])
def test_spoilt_answers_are_read_as_h11_reads_them_or_refused_on_purpose(data: bytes, places: list[int]) -> None:
    ours = read_answer_by_us([data])
    assert difference(data, ours, read_answer_by_h11(data)) == ""
    assert read_answer_by_us(pieces_of(data, places)) == ours, "however it is cut"


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from(HOSTILE) | st.binary(max_size=5), max_size=30), cuts)
@example([b"\r", b"\r\n"], [2])
def test_hostile_bytes_are_read_as_h11_reads_them_or_refused_on_purpose(parts: list[bytes], places: list[int]) -> None:
    data = b"".join(parts)
    ours = read_by_us([data])
    assert difference(data, ours, read_by_h11(data)) == ""
    assert read_by_us(pieces_of(data, places)) == ours, "however it is cut"
