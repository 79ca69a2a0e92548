"""Messages as they come: what is told from the heads is what decoding tells, and nothing is told of a bad message."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.follow.inputs import BatchSpan, message_span, read_message
from kv_protocol import codec
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from tests.support.amount import examples

STORED, CHILD, REMOVED, CLEARED = Stored((1, 2)), Stored((3, 4), 2, 2, Tier.HOST), Removed((3,), Tier.HOST), Cleared()


def message(*batches: Batch) -> bytes:
    return codec.encode_message(batches)


def row(first_seq: int, *events: Event, epoch: int = 7) -> list[Batch]:
    return [Batch(epoch, first_seq + at, event, 5, 100 + at) for at, event in enumerate(events)]


def decoded_span(data: bytes) -> BatchSpan | None:
    """Return what decoding tells of the message."""
    batches = codec.decode_message(data)
    first, last = batches[0], batches[-1]
    is_row = [(batch.epoch, batch.seq) for batch in batches] == [
        (first.epoch, first.seq + at) for at in range(len(batches))
    ]
    return BatchSpan(first.epoch, first.seq, last.seq, last.engine_time_ns) if is_row else None


@pytest.mark.parametrize("event", [STORED, CHILD, REMOVED, CLEARED])
def test_the_span_of_one_batch_is_its_place(event: Event) -> None:
    assert message_span(message(*row(4, event))) == BatchSpan(7, 4, 4, 100)


def test_the_span_of_several_is_from_the_first_to_the_last() -> None:
    data = message(*row(4, STORED, CHILD, REMOVED, CLEARED))
    assert message_span(data) == BatchSpan(7, 4, 7, 103)
    read = read_message(data)
    assert (read.data, read.span, read.engine_time_ns) == (data, BatchSpan(7, 4, 7, 103), 103)


@pytest.mark.parametrize(
    "batches",
    [
        [*row(4, STORED), *row(6, STORED)],
        [*row(4, STORED), *row(4, STORED)],
        [*row(5, STORED), *row(4, STORED)],
        [*row(4, STORED), *row(5, STORED, epoch=8)],
    ],
    ids=["a hole", "twice", "backwards", "two epochs"],
)
def test_batches_that_do_not_follow_each_other_have_no_span_and_are_a_message(batches: list[Batch]) -> None:
    read = read_message(message(*batches))
    assert (read.span, read.engine_time_ns) == (None, batches[-1].engine_time_ns)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0", b"\1\0", message(*row(1, STORED))[:-1], bytes(60)], ids=len)
def test_what_cannot_be_cut_has_no_span_and_is_no_message(data: bytes) -> None:
    assert message_span(data) is None
    with pytest.raises(MalformedMessage):
        read_message(data)


def spoilt() -> Iterator[tuple[str, bytes]]:
    """Yield messages of which one head says what no head may say."""
    for event in (STORED, CHILD, REMOVED, CLEARED):
        whole = message(*row(1, STORED, event))
        at = 2 + 52 + 16
        fields = {
            "version": (at, b"\2"),
            "kind": (at + 1, b"\3"),
            "tier": (at + 2, b"\4"),
            "flags": (at + 3, b"\2"),
            "a parent": (at + 3, bytes([1 - whole[at + 3]])),
            "start": (at + 44, struct.pack("<I", 0 if event is CHILD else 1)),
            "start beyond u32": (at + 44, b"\xff" * 4),
            "n": (at + 48, struct.pack("<I", 1 << 31)),
        }
        for name, (offset, value) in fields.items():
            yield f"{name} of {type(event).__name__}", whole[:offset] + value + whole[offset + len(value) :]
    yield "no blocks", message(*row(1, CLEARED))[:3] + b"\0" + message(*row(1, CLEARED))[4:]
    yield "seq 0", message(*row(1, STORED))[:14] + bytes(8) + message(*row(1, STORED))[22:]


SPOILT = dict(spoilt())


@pytest.mark.parametrize("name", SPOILT)
def test_a_head_that_breaks_a_rule_makes_no_message(name: str) -> None:
    assert message_span(SPOILT[name]) is None
    with pytest.raises(MalformedMessage):
        read_message(SPOILT[name])


u64s = st.integers(0, 2**64 - 1)
hashes = st.lists(u64s, min_size=1, max_size=5).map(tuple)
tiers = st.sampled_from(TIERS)
events = st.one_of(
    st.builds(Stored, hashes, st.none(), st.just(0), tiers),
    st.builds(Stored, hashes, u64s, st.integers(1, 2**32 - 5), tiers),
    st.builds(Removed, hashes, tiers),
    st.builds(Cleared, tiers),
)
rows = st.builds(
    lambda first, epoch, each: row(first, *each, epoch=epoch),
    st.integers(1, 9) | st.just(2**64 - 9), u64s, st.lists(events, min_size=1, max_size=4),
)  # fmt: skip
mixtures = st.lists(rows, min_size=1, max_size=2).map(lambda each: [batch for row_ in each for batch in row_])


@settings(max_examples=examples(400))
@given(mixtures)
def test_of_any_message_the_heads_tell_what_decoding_tells(batches: list[Batch]) -> None:
    data = message(*batches)
    assert message_span(data) == decoded_span(data)


@settings(max_examples=examples(1500))
@given(mixtures, st.integers(0, 400), st.integers(0, 255), st.sampled_from(["change", "cut", "add"]))
def test_of_any_spoilt_message_the_heads_tell_no_more_than_decoding(
    batches: list[Batch], at: int, byte: int, how: str
) -> None:
    data = message(*batches)
    at %= len(data)
    match how:
        case "change":
            data = data[:at] + bytes([byte]) + data[at + 1 :]
        case "cut":
            data = data[:at]
        case _:
            data += bytes([byte])
    try:
        expected = decoded_span(data)
    except MalformedMessage:
        expected = None
    assert message_span(data) == expected
