from collections.abc import Callable
from typing import Any

import pytest

from kv_protocol.codec import (
    BLOCKS_PER_EVENT_MAX,
    MESSAGE_BYTES_MAX,
    decode_message,
    encode_batch,
    encode_message,
    pack_message,
    split_event,
)
from kv_protocol.errors import LimitExceeded, MalformedMessage
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


def test_a_message_without_batches_is_refused_at_its_count() -> None:
    for data, reason in (
        (b"", "0 bytes, a count needs 2"),
        (b"\x01", "1 bytes, a count needs 2"),
        (b"\x00\x00", "count is 0, at least one batch is needed"),
        (b"\x00\x00" + VALID[2:], "count is 0, at least one batch is needed"),
    ):
        refused = refusal(data)
        assert (refused.offset, refused.reason) == (0, reason)


def test_bytes_after_the_last_batch_are_refused() -> None:
    for tail in (b"\0", b"\xff" * 8, VALID[2:]):
        refused = refusal(VALID + tail)
        assert (refused.offset, refused.reason) == (len(VALID), f"{len(tail)} bytes after the last of 4 batches")


def test_a_field_that_may_not_be_is_refused_where_it_stands() -> None:
    for batch_at, field_at, value, offset, reason in (
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
    ):
        refused = refusal(changed(batch_at + field_at, value))
        assert (refused.offset, refused.reason[: len(reason)]) == (offset, reason)


def test_a_stored_or_removed_batch_without_blocks_is_refused() -> None:
    for kind in (0, 1):
        data = encode_message([Batch(9, 4, Cleared())])[:3] + bytes([kind]) + VALID[FOURTH + TIER : FOURTH + 52]
        assert refusal(data).reason == "sequence_hashes: found 0, allowed at least one block"


def test_a_count_of_blocks_that_nothing_backs_costs_no_memory() -> None:
    refused = refusal(changed(FIRST + N, 2**32 - 1, 4))
    assert (refused.offset, refused.reason) == (FIRST + N, f"n is {2**32 - 1} blocks, only 25 follow")


# ---------------------------------------------------------------- two steps


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_a_message_comes_in_any_buffer(form: Callable[[bytes], bytes]) -> None:
    assert decode_message(form(VALID)) == BATCHES


@pytest.mark.parametrize("kind", [Stored, Removed])
def test_the_largest_event_fits_a_message_and_one_block_more_is_refused(kind: type[Stored | Removed]) -> None:
    batch = Batch(1, 1, kind(tuple(range(BLOCKS_PER_EVENT_MAX))))
    message = encode_message([batch])
    assert MESSAGE_BYTES_MAX - 8 < len(message) <= MESSAGE_BYTES_MAX
    assert decode_message(message) == [batch]
    with pytest.raises(LimitExceeded, match=rf"^n: found {BLOCKS_PER_EVENT_MAX + 1}, allowed at most"):
        encode_batch(Batch(1, 1, kind(tuple(range(BLOCKS_PER_EVENT_MAX + 1)))))


def test_batches_that_fit_one_by_one_but_not_together_are_refused() -> None:
    half = Batch(1, 1, Removed(tuple(range(BLOCKS_PER_EVENT_MAX // 2))))
    assert decode_message(encode_message([half])) == [half]
    with pytest.raises(LimitExceeded, match=r"^message: found 524330, allowed at most 524288 bytes$"):
        encode_message([half, half])


def test_a_message_has_a_batch_and_no_more_than_a_u16_counts() -> None:
    for batches in ([], [b""] * 65_536):
        with pytest.raises(LimitExceeded, match=rf"^count: found {len(batches)}, allowed 1\.\.65535 batches"):
            pack_message(batches)


@pytest.mark.parametrize("sequence_hash", [-1, 2**64, 1.5, None])
def test_a_hash_that_is_no_u64_is_refused(sequence_hash: int) -> None:
    for event in (Stored((1, sequence_hash)), Removed((sequence_hash,))):
        with pytest.raises(LimitExceeded, match=r"^hash: "):
            encode_batch(Batch(1, 1, event))


def test_decoding_refuses_more_bytes_than_a_message_may_have() -> None:
    batch = encode_batch(Batch(1, 1, Removed(tuple(range(BLOCKS_PER_EVENT_MAX)))))
    message = (2).to_bytes(2, "little") + batch + encode_batch(Batch(1, 2, Cleared()))
    with pytest.raises(MalformedMessage, match=f"{len(message)} bytes, at most {MESSAGE_BYTES_MAX} allowed") as refused:
        decode_message(message)
    assert refused.value.offset == MESSAGE_BYTES_MAX


def test_an_event_is_split_at_the_size_of_a_message_unless_told_otherwise() -> None:
    parts = list(split_event(Stored(tuple(range(2 * BLOCKS_PER_EVENT_MAX + 1)))))
    sizes = [len(part.sequence_hashes) for part in parts if isinstance(part, Stored)]
    assert sizes == [BLOCKS_PER_EVENT_MAX, BLOCKS_PER_EVENT_MAX, 1]
    assert all(len(encode_message([Batch(1, 1, part)])) <= MESSAGE_BYTES_MAX for part in parts)


def test_parts_of_a_stored_event_are_linked_by_parent_and_cover_it() -> None:
    for n in (1, 2, 3, 4, 5, 9, 10, 11):
        for parent, start in ((None, 0), (99, 7)):
            whole = Stored(tuple(range(100, 100 + n)), parent, start, Tier.HOST)
            covered: tuple[int, ...] = ()
            for part in split_event(whole, 3):
                assert isinstance(part, Stored)
                assert 1 <= len(part.sequence_hashes) <= 3
                assert part.parent == (covered[-1] if covered else parent)
                assert (part.start, part.tier) == (start + len(covered), Tier.HOST)
                covered += part.sequence_hashes
            assert covered == whole.sequence_hashes


def test_blocks_lie_at_the_root_or_after_a_parent_at_u32_positions() -> None:
    for blocks, parent, start, error in (
        (1, None, 1, "start: found 1, allowed 0 without a parent, more than 0 with"),
        (1, None, -1, "start: found -1, allowed 0 without a parent, more than 0 with"),
        (1, 7, 0, "start: found 0, allowed 0 without a parent, more than 0 with"),
        (1, 0, 0, "start: found 0, allowed 0 without a parent, more than 0 with"),
        (1, 7, -1, "start: found -1, allowed a u32"),
        (1, 7, 2**32, f"start: found {2**32}, allowed a u32"),
        (1000, 7, 2**32 - 999, f"start: found {2**32 - 999}, allowed a u32"),
        (1, -1, 1, "parent: found -1, allowed u64"),
        (1, 2**64, 1, f"parent: found {2**64}, allowed u64"),
        (0, None, 0, "sequence_hashes: found 0, allowed at least one block"),
    ):
        with pytest.raises(LimitExceeded, match=f"^{error}"):
            Stored(tuple(range(blocks)), parent, start)


def test_a_batch_number_beyond_its_width_cannot_exist() -> None:
    for field, values, allowed in (
        ("epoch", (-1, 2**64), "u64"),
        ("seq", (-1, 2**64), "u64"),
        ("seq", (0,), "1 or more"),
        ("source_seq", (-1, 2**64), "u64"),
        ("engine_time_ns", (2**63, -(2**63) - 1), "i64"),
    ):
        for value in values:
            numbers: dict[str, Any] = {"epoch": 1, "seq": 1, field: value}
            with pytest.raises(LimitExceeded, match=rf"^{field}: found {value}, allowed {allowed}"):
                Batch(event=Cleared(), **numbers)
