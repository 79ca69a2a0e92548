"""What every prefix index does with messages of canonical batches: it takes those that the codec decodes."""

from itertools import accumulate

import pytest

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.codec import MESSAGE_BYTES_MAX, decode_message, encode_batch, encode_message
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored
from tests.contract.indexes import DISK, EXTERNAL, GPU, HOST, U64_MAX, MakeIndex, assert_sound, chain, held, overlaps

PATH = chain(5)
EVENTS: list[Event] = [
    Stored(tuple(PATH[:3])),
    Stored(tuple(PATH[3:]), PATH[2], 3, HOST),
    Removed((PATH[4], PATH[1]), HOST),
    Removed((PATH[2],)),
    Stored((PATH[2],), PATH[1], 2, DISK),
    Cleared(EXTERNAL),
]
BATCHES = [Batch(9, 1 + at, event, 5, 6) for at, event in enumerate(EVENTS)]
VALID = encode_message(BATCHES)
OFFSETS = list(accumulate([len(encode_batch(each)) for each in BATCHES[:-1]], initial=2))
VERSION, KIND, TIER, FLAGS, SEQ, PARENT, START, N = 0, 1, 2, 3, 12, 36, 44, 48
"""Where a head's fields begin."""


def changed(batch: int, field: int, value: int, width: int = 1) -> bytes:
    """Return the valid message with a field of one batch replaced."""
    at = OFFSETS[batch] + field
    return VALID[:at] + value.to_bytes(width, "little") + VALID[at + width :]


def told(index: PrefixIndex, events: list[Event], rank: int = 0) -> None:
    """Tell an index of events one by one."""
    for event in events:
        match event:
            case Stored(hashes, parent, _, tier):
                index.store(rank, parent, hashes, tier, 0)
            case Removed(hashes, tier):
                index.remove(rank, hashes, tier)
            case Cleared(tier):
                index.clear(rank, tier)


def test_a_message_does_what_its_events_do(index: PrefixIndex, make_index: MakeIndex) -> None:
    twin = make_index()
    twin.register(0)
    told(twin, EVENTS)
    assert index.apply_batch(0, VALID, 0) == 0
    assert held(index, 0) == held(twin, 0)
    assert overlaps(index, PATH) == overlaps(twin, PATH) == {0: (2, 2, 4, 4)}
    assert_sound(index, 0)
    assert index.statistics().unknown_removals_total == twin.statistics().unknown_removals_total == 1


def test_hashes_of_zero_and_the_largest_number_are_applied(index: PrefixIndex) -> None:
    message = encode_message([Batch(1, 1, Stored((0, U64_MAX))), Batch(1, 2, Stored((5,), 0, 1))])
    assert index.apply_batch(0, message, 0) == 0
    assert held(index, 0) == {0: (None, 1), U64_MAX: (0, 1), 5: (0, 1)}


FRAMING: dict[str, bytes] = {
    "nothing": b"",
    "half a count": b"\1",
    "count 0": b"\0\0" + VALID[2:],
    "count too small": b"\5\0" + VALID[2:],
    "count too large": b"\7\0" + VALID[2:],
    "count far too large": b"\xff\xff" + VALID[2:],
    "a byte more": VALID + b"\0",
    "version 0": changed(0, VERSION, 0),
    "version 2 at the end": changed(5, VERSION, 2),
    "n one too large at the end": changed(5, N, 1, 4),
    "n absurd": changed(1, N, 2**32 - 1, 4),
    "n wraps in 32 bits": changed(0, N, 2**29, 4),
    "too long": VALID + bytes(MESSAGE_BYTES_MAX),
    "bad framing after a bad event": changed(0, TIER, 9) + b"\0",
}


BAD_EVENTS: dict[str, bytes] = {
    "tier 4": changed(0, TIER, 4),
    "tier 255": changed(2, TIER, 255),
    "flags 2": changed(0, FLAGS, 2),
    "flags 0x81": changed(1, FLAGS, 0x81),
    "flags 0xff": changed(4, FLAGS, 0xFF),
    "tier and flags": changed(1, TIER, 0xFF04, 2),
    "kind 3": changed(0, KIND, 3),
    "kind 255": changed(5, KIND, 255),
    "cleared with blocks": changed(0, KIND, 2),
    "removed with a parent": changed(1, KIND, 1),
    "cleared with a parent": changed(5, FLAGS, 1),
    "removed with a start": changed(2, START, 7, 4),
    "stored without blocks": changed(5, KIND, 0),
    "removed without blocks": changed(5, KIND, 1),
    "a parent at position 0": changed(1, START, 0, 4),
    "no parent at position 3": changed(1, FLAGS, 0),
    "positions beyond u32": changed(1, START, 2**32 - 1, 4),
    "seq 0": changed(0, SEQ, 0, 8),
    "seq 0 of a cleared": changed(5, SEQ, 0, 8),
    "kind 3 with a parent and a start": changed(1, KIND, 3),
    "seq 0 and a start": changed(1, SEQ, 0, 8)[: OFFSETS[1] + START] + b"\0" * 4 + VALID[OFFSETS[1] + N :],
}


@pytest.mark.parametrize("message", [*FRAMING.values(), *BAD_EVENTS.values()], ids=[*FRAMING, *BAD_EVENTS])
def test_what_is_no_message_of_events_changes_nothing(index: PrefixIndex, message: bytes) -> None:
    refuses(index, message)


def test_a_truncated_message_changes_nothing(index: PrefixIndex) -> None:
    for length in range(len(VALID)):
        refuses(index, VALID[:length])


def refuses(index: PrefixIndex, message: bytes) -> None:
    index.store(0, None, PATH[:2], GPU, 0)
    before = index.snapshot(), index.statistics()
    for read in (decode_message, lambda message: index.apply_batch(0, message, 0)):
        with pytest.raises(MalformedMessage):
            read(message)
    assert (index.snapshot(), index.statistics()) == before


def test_positions_up_to_the_last_of_u32_are_fine(index: PrefixIndex) -> None:
    index.store(0, None, PATH[:3], GPU, 0)
    assert index.apply_batch(0, changed(1, START, 2**32 - 2, 4), 0) == 0


@pytest.mark.parametrize("field", range(52))
def test_any_byte_of_a_head_may_be_anything(make_index: MakeIndex, field: int) -> None:
    for batch, value in ((0, 0), (1, 1), (2, 2), (3, 0xFF), (4, 0x80), (5, 3)):
        message = changed(batch, field, value)
        index, twin = make_index(), make_index()
        for each in (index, twin):
            each.register(0)
        try:
            events = [batch.event for batch in decode_message(message)]
        except MalformedMessage:
            with pytest.raises(MalformedMessage):
                index.apply_batch(0, message, 0)
        else:
            assert index.apply_batch(0, message, 0) == 0, (batch, value)
            told(twin, events)
            assert held(index, 0) == held(twin, 0), (batch, value)
