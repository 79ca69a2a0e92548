"""Where bodies end, piece by piece, and what a client gets of a stream that is kept for another worker."""

import json
from collections.abc import Sequence

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.continuation import token_comment, without_tokens
from router.http.heads import CHUNKED, TAIL_BYTES, UNTIL_CLOSE, AnswerBody, BodyReader, Malformed
from router.http.stream_replay import StreamReplayBuffer
from router.native import built

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=9)
TEXT = st.one_of(st.text(max_size=20), st.sampled_from([": tokens AAAA", "\n: tokens AAAA\n", "data: [DONE]"]))
EVENTS = st.lists(st.tuples(TOKENS, TEXT), min_size=1, max_size=6)


def said(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


def parts(events: Sequence[tuple[list[int], str]]) -> list[tuple[bytes, bytes]]:
    """Return each event as the worker sends it, and as a client gets it."""
    return [(token_comment(tokens) + said(text), said(text)) for tokens, text in events]


@given(EVENTS)
def test_events_lose_their_comments_and_nothing_else(events: list[tuple[list[int], str]]) -> None:
    whole, bare = (b"".join(each) for each in zip(*parts(events), strict=True))
    assert without_tokens(whole) == (bare, sum(len(tokens) for tokens, _ in events))
    assert without_tokens(bare) == (bare, 0)


@given(EVENTS, st.booleans())
def test_all_is_kept_and_the_client_gets_what_it_wants(events: list[tuple[list[int], str]], hides_tokens: bool) -> None:
    kept, got = StreamReplayBuffer(hides_tokens=hides_tokens), b""
    for whole, bare in parts(events):
        shown = kept.add(whole)
        got += shown
        assert shown == (bare if hides_tokens else whole)
    assert kept.kept.events == b"".join(whole for whole, _ in parts(events))
    assert kept.later_tokens == sum(len(tokens) for tokens, _ in events[1:])


@pytest.mark.parametrize("bytes_max", [0, 60])
def test_of_a_stream_that_is_too_long_comments_are_hidden_and_counted_on(bytes_max: int) -> None:
    kept, event = StreamReplayBuffer(kept=built.KeptEvents(bytes_max)), token_comment([1, 2]) + said("ab")
    assert [kept.add(event) for _ in range(4)] == [said("ab")] * 4
    assert (kept.kept.is_overfull, kept.kept.events, kept.later_tokens) == (True, b"", 6)


BODY = b'5\r\nhello\r\n6;x="y"\r\n world\r\n1  \r\n!\r\n00\r\nx: y\r\n\r\n'


def read(data: bytes, piece: int) -> tuple[bytes, int]:
    """Return the payload of a chunked body that comes in such pieces, and where it ends; -1 where it does not."""
    reader, payload = BodyReader(CHUNKED), bytearray()
    for at in range(0, len(data), piece):
        end = reader.feed(data[at : at + piece], payload)
        if end >= 0:
            return bytes(payload), at + end
    return bytes(payload), -1


@pytest.mark.parametrize("piece", range(1, len(BODY) + 5))
def test_chunks_in_any_pieces_are_the_same_body_that_does_not_end_before_its_end(piece: int) -> None:
    assert read(BODY + b"next", piece) == (b"hello world!", len(BODY))
    assert read(BODY[: piece - 1][: len(BODY) - 1], 1)[1] == -1


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b" 1\r\n",
        b"+1\r\n",
        b"-1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b"1\n",
        b"1\rx\r\n",
        b"1 2\r\n",
        b"1;\x00\r\n",
        b"1;a\rb\r\n",
        b"1" * 16 + b"\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\r\r\n",
        b"0\r\nno trailer\r\n",
        b"0\r\n x: y\r\n",
        b"0\r\nx: y\n",
        b"1;" + b"x" * 4096,
        b"0\r\n" + b"x: y\r\n" * 3000,
    ],
)
def test_what_is_no_chunked_body_is_refused_in_any_pieces(data: bytes) -> None:
    for piece in (1, 2, 3, len(data)):
        with pytest.raises(Malformed):
            read(data + b"\r\n" * 3000, piece)


@pytest.mark.parametrize(
    "data", [b"1\r\nab\r\n0\r\n\r\n", b"1\na\r\n0\r\n\r\n", b"1\r\na\n0\r\n\r\n", b"1\r\na\r\n0\n\r\n", b"0\r\n\n"]
)
def test_a_fault_is_refused_though_a_body_would_end_behind_it(data: bytes) -> None:
    for piece in range(1, len(data) + 1):
        with pytest.raises(Malformed):
            read(data, piece)


@pytest.mark.parametrize("piece", range(1, 8))
def test_a_length_is_read_to_its_end_and_no_further(piece: int) -> None:
    reader, payload, data = BodyReader(5), bytearray(), b"hello, you"
    ends = [reader.feed(data[at : at + piece], payload) + at for at in range(0, 5, piece)]
    assert (bytes(payload), ends[-1]) == (b"hello", 5)


def test_the_rest_of_a_chunk_is_known_and_a_body_until_the_end_has_no_other() -> None:
    reader, payload = BodyReader(CHUNKED), bytearray()
    reader.feed(b"fffffffffffffff\r\nabc", bytearray())
    assert reader.left == 0xFFFFFFFFFFFFFFF - 3
    assert BodyReader(UNTIL_CLOSE).feed(b"0\r\n\r\n", payload) == -1
    assert payload == b"0\r\n\r\n"


# ---------------------------------------------------------------- what is passed on


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n", b"\r\r"])
@pytest.mark.parametrize("rest", [b"", b"data: b", b"data: b\n", b"data: b\r\n", b"data: b\r"])
def test_complete_events_are_taken_and_the_beginning_of_another_stays(end: bytes, rest: bytes) -> None:
    events = (b"data: a" + end) * 3
    body = AnswerBody(UNTIL_CLOSE, b"")
    assert (body.feed(events + rest), body.end) == (None, -1)
    assert [body.take_events(), body.pending, body.take_events(), body.pending] == [events, rest, b"", rest]
    assert body.tail == events


@given(st.lists(st.text("a\r\n", min_size=1, max_size=6), max_size=12))
def test_events_are_complete_as_soon_as_their_empty_line_is_there(pieces: list[str]) -> None:
    body, pending = AnswerBody(UNTIL_CLOSE, b""), b""
    for piece in pieces:
        body.feed(piece.encode())
        pending += piece.encode()
        ends = [at for at in range(len(pending) + 1) if pending[:at].endswith((b"\n\n", b"\n\r\n", b"\r\r"))]
        assert body.take_events() == pending[: max(ends, default=0)]
        pending = pending[max(ends, default=0) :]
        assert body.pending == pending


@pytest.mark.parametrize(
    ("mark", "data", "marks"),
    [
        (b"", b"", 0),
        (b"", b"a\n\nb\n\n", 2),
        (b"", b"a\n\r\nb\n\r\n", 2),
        (b"", b"a\n\nb\n\r\nc\n\r\n", 1),
        (b'.delta"', b'event: x\n\ndata: "x.delta"\n\ndata: ".delta""y.delta"\n\n', 3),
    ],
)
def test_what_is_taken_is_counted_by_its_mark_or_its_events(mark: bytes, data: bytes, marks: int) -> None:
    body = AnswerBody(UNTIL_CLOSE, mark)
    body.feed(data)
    assert (body.take_events(), body.marks) == (data, marks)
    assert (body.take(1), body.marks) == (b"", 0)


def test_a_stream_holds_no_more_memory_than_its_pending_event_needs() -> None:
    bodies = [AnswerBody(UNTIL_CLOSE, b"") for _ in range(400)]
    before = psutil.Process().memory_info().rss
    for body in bodies:
        for _ in range(16):
            body.feed(b"x" * (16 << 10))
        body.feed(b"\n\n:")
        assert len(body.take_events()) == (256 << 10) + 2
    assert psutil.Process().memory_info().rss - before < 400 * (64 << 10)


def test_a_body_has_begun_with_its_first_byte_and_is_taken_in_parts() -> None:
    body = AnswerBody(CHUNKED, b"")
    assert (body.feed(b"5\r\n"), body.end, body.has_begun) == (None, -1, False)
    assert (body.feed(b"hello\r\n0\r\n\r\nnext"), body.end, body.has_begun, body.size) == (None, 12, True, 5)
    assert [body.take(2), body.take(body.size), body.size, body.tail] == [b"he", b"llo", 0, b"hello"]


@pytest.mark.parametrize("sizes", [[3], [1, 5000, 3], [4000, 97, 3], [50] * 1000, [70_000]])
def test_the_tail_is_the_end_of_what_was_taken(sizes: list[int]) -> None:
    body, payload = AnswerBody(UNTIL_CLOSE, b""), b""
    for at, size in enumerate(sizes):
        events = bytes([97 + at % 26]) * size + b"\n\n"
        payload += events
        body.feed(events + b"data")
        assert body.tail == payload[: -len(events)][-TAIL_BYTES:]
        assert body.take(len(events)) == events
        body.take(4)
        payload += b"data"
        assert body.tail == payload[-TAIL_BYTES:]


def flowing(
    pending_max: int = 100, alarms: tuple[bytes, ...] = (), *, chunks: bool = True
) -> tuple[AnswerBody, built.KeptEvents]:
    """Return a stream that flows behind its first byte, and what keeps its events."""
    body, kept = AnswerBody(CHUNKED, b""), built.KeptEvents(20)
    body.pass_on(chunks, pending_max, kept, alarms)
    body.flows = True
    assert (body.feed(b"1\r\n:\r\n"), body.take(1)) == (None, b":")
    return body, kept


@pytest.mark.parametrize("chunks", [True, False])
def test_complete_events_of_a_stream_flow_as_one_chunk(chunks: bool) -> None:
    body, kept = flowing(chunks=chunks)
    assert body.feed(b"3\r\na\n\n\r\n4\r\nb\n\nc\r\n") == (b"6\r\na\n\nb\n\n\r\n" if chunks else b"a\n\nb\n\n")
    assert (body.feed(b"1\r\n"), body.pending, kept.events, body.later) == (b"", b"c", b"a\n\nb\n\n", 2)
    assert body.feed(b"\n\r\n1\r\n\n\r\n") == (b"3\r\nc\n\n\r\n" if chunks else b"c\n\n")
    assert (body.tail, body.later, kept.events) == (b":a\n\nb\n\nc\n\n", 3, b"a\n\nb\n\nc\n\n")
    assert (body.feed(b"f\r\n" + b"d" * 13 + b"\n\n\r\n") is None, kept.is_overfull, kept.events) == (False, True, b"")


@pytest.mark.parametrize(
    ("data", "pending"),
    [(b"0\r\n\r\n", b""), (b"a\r\n: tokens\n\n\r\n", b": tokens\n\n"), (b"5\r\nabcde\r\n", b"abcde")],
    ids=["its end", "an alarm", "a long event"],
)
def test_a_stream_stops_flowing_where_there_is_something_to_judge(data: bytes, pending: bytes) -> None:
    body, kept = flowing(4, (b": tokens",))
    assert (body.feed(data), body.pending, kept.events) == (None, pending, b"")
