from collections.abc import Callable

import pytest

from kv_protocol.codec import decode_message, encode_message
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Batch, Cleared, Removed, Stored, Tier

BATCHES = [
    Batch(9, 1, Stored((11, 12, 13))),
    Batch(9, 2, Stored((14,), 13, 3, Tier.HOST), 5, 6),
    Batch(9, 3, Removed((11, 12), Tier.DISK)),
    Batch(9, 4, Cleared(Tier.EXTERNAL)),
]
VALID = encode_message(BATCHES)
FIRST, SECOND, THIRD, FOURTH = 2, 2 + 76, 2 + 76 + 60, 2 + 76 + 60 + 68
"""Where each batch begins: a head of 52 bytes, then 8 for each hash."""
VERSION, KIND, TIER, FLAGS, SEQ, START, N = 0, 1, 2, 3, 12, 44, 48
"""Where a head's fields begin."""


def changed(at: int, value: int, width: int = 1) -> bytes:
    """Return the valid message with the bytes at `at` replaced."""
    return VALID[:at] + value.to_bytes(width, "little") + VALID[at + width :]


def refusal(data: bytes) -> MalformedMessage:
    """Return the error of decoding `data`, whose offset lies within it."""
    with pytest.raises(MalformedMessage) as refused:
        decode_message(data)
    assert 0 <= refused.value.offset <= len(data)
    assert str(refused.value) == f"malformed at byte {refused.value.offset}: {refused.value.reason}"
    return refused.value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes, a count needs 2"),
        (b"\x01", "1 bytes, a count needs 2"),
        (b"\x00\x00", "count is 0, at least one batch is needed"),
        (b"\x00\x00" + VALID[2:], "count is 0, at least one batch is needed"),
    ],
)
def test_a_message_without_batches_is_refused_at_its_count(data: bytes, reason: str) -> None:
    refused = refusal(data)
    assert (refused.offset, refused.reason) == (0, reason)


@pytest.mark.parametrize("tail", [b"\0", b"\xff" * 8, VALID[2:]], ids=len)
def test_bytes_after_the_last_batch_are_refused(tail: bytes) -> None:
    refused = refusal(VALID + tail)
    assert (refused.offset, refused.reason) == (len(VALID), f"{len(tail)} bytes after the last of 4 batches")


@pytest.mark.parametrize(
    ("batch_at", "field_at", "value", "offset", "reason"),
    [
        (FIRST, VERSION, 0, FIRST, "version 0, only 1 is known"),
        (FOURTH, VERSION, 2, FOURTH, "version 2, only 1 is known"),
        (FIRST, KIND, 3, FIRST, "kind: found 3"),
        (FIRST, KIND, 255, FIRST, "kind: found 255"),
        (FIRST, KIND, 2, FIRST, "kind: found 2"),  # cleared, with blocks
        (SECOND, KIND, 1, SECOND, "parent and start: found (13, 3)"),  # removed, with a parent
        (FIRST, TIER, 4, FIRST + TIER, "tier 4, allowed 0..3"),
        (THIRD, TIER, 255, THIRD + TIER, "tier 255, allowed 0..3"),
        (FIRST, FLAGS, 2, FIRST + FLAGS, "flags 0x2, only bit 0 is known"),
        (SECOND, FLAGS, 0x81, SECOND + FLAGS, "flags 0x81, only bit 0 is known"),
        (FIRST, FLAGS, 1, FIRST, "start: found 0"),  # a parent, yet at position 0
        (SECOND, FLAGS, 0, SECOND, "start: found 3"),  # no parent, yet at position 3
        (THIRD, FLAGS, 1, THIRD, "parent and start: found (0, 0)"),
        (THIRD, START, 1, THIRD, "parent and start: found (None, 1)"),
        (FOURTH, START, 1, FOURTH, "parent and start: found (None, 1)"),
        (FOURTH, FLAGS, 1, FOURTH, "parent and start: found (0, 0)"),
        (FIRST, SEQ, 0, FIRST, "seq: found 0, allowed 1 or more"),
        (FOURTH, N, 1, FOURTH + N, "n is 1 blocks, only 0 follow"),
    ],
)
def test_a_field_that_may_not_be_is_refused_where_it_stands(
    batch_at: int, field_at: int, value: int, offset: int, reason: str
) -> None:
    refused = refusal(changed(batch_at + field_at, value))
    assert refused.offset == offset
    assert refused.reason.startswith(reason)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_stored_or_removed_batch_without_blocks_is_refused(kind: int) -> None:
    refused = refusal(encode_message([Batch(9, 4, Cleared())])[:3] + bytes([kind]) + VALID[FOURTH + TIER : FOURTH + 52])
    assert (refused.offset, refused.reason) == (2, "sequence_hashes: found 0, allowed at least one block")


@pytest.mark.parametrize("n", [2**31, 2**32 - 1])
def test_a_count_of_blocks_that_nothing_backs_costs_no_memory(n: int) -> None:
    refused = refusal(changed(FIRST + N, n, 4))
    assert (refused.offset, refused.reason) == (FIRST + N, f"n is {n} blocks, only 25 follow")


# ---------------------------------------------------------------- two steps


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_a_message_comes_in_any_buffer(form: Callable[[bytes], bytes]) -> None:
    assert decode_message(form(VALID)) == BATCHES
