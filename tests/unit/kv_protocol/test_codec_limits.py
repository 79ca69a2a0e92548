import pytest

from kv_protocol.codec import (
    BATCHES_PER_MESSAGE_MAX,
    BLOCKS_PER_EVENT_MAX,
    MESSAGE_BYTES_MAX,
    decode_message,
    encode_batch,
    encode_message,
    pack_message,
    pack_u64,
    split_event,
    unpack_u64,
)
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.events import Batch, Cleared, Removed, Stored, Tier

SIZES = [1, 2, 3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize("kind", [Stored, Removed])
def test_the_largest_event_fits_a_message(kind: type[Stored | Removed]) -> None:
    batch = Batch(1, 1, kind(tuple(range(BLOCKS_PER_EVENT_MAX))))
    message = encode_message([batch])
    assert MESSAGE_BYTES_MAX - 8 < len(message) <= MESSAGE_BYTES_MAX
    assert decode_message(message) == [batch]


@pytest.mark.parametrize("kind", [Stored, Removed])
def test_one_block_more_is_refused(kind: type[Stored | Removed]) -> None:
    with pytest.raises(LimitExceeded, match=rf"^n: found {BLOCKS_PER_EVENT_MAX + 1}, allowed at most"):
        encode_batch(Batch(1, 1, kind(tuple(range(BLOCKS_PER_EVENT_MAX + 1)))))


def test_batches_that_fit_one_by_one_but_not_together_are_refused() -> None:
    half = Batch(1, 1, Removed(tuple(range(BLOCKS_PER_EVENT_MAX // 2))))
    assert decode_message(encode_message([half])) == [half]
    with pytest.raises(LimitExceeded, match=r"^message: found 524330, allowed at most 524288 bytes$"):
        encode_message([half, half])


def test_a_message_has_a_batch() -> None:
    with pytest.raises(LimitExceeded, match=r"^count: found 0, allowed 1\.\.65535 batches"):
        encode_message([])


def test_a_count_beyond_u16_is_refused_before_it_wraps() -> None:
    assert BATCHES_PER_MESSAGE_MAX == 65_535
    with pytest.raises(LimitExceeded, match=r"^count: found 65536"):
        pack_message([b""] * 65_536)


@pytest.mark.parametrize("sequence_hash", [-1, 2**64, 1.5, None])
def test_a_hash_that_is_no_u64_is_refused(sequence_hash: int) -> None:
    for event in (Stored((1, sequence_hash)), Removed((sequence_hash,))):
        with pytest.raises(LimitExceeded, match=r"^hash: "):
            encode_batch(Batch(1, 1, event))


def test_u64s_are_packed_little_endian() -> None:
    values = (0, 1, 0x0102030405060708, 2**64 - 1)
    assert pack_u64(values) == b"".join(value.to_bytes(8, "little") for value in values)
    assert unpack_u64(memoryview(pack_u64(values))) == values
    assert unpack_u64(b"") == ()


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


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("parent", "start"), [(None, 0), (99, 7)])
def test_parts_of_a_stored_event_are_linked_by_parent_and_cover_it(n: int, parent: int | None, start: int) -> None:
    whole = Stored(tuple(range(100, 100 + n)), parent, start, Tier.HOST)
    covered: tuple[int, ...] = ()
    for part in split_event(whole, 3):
        assert isinstance(part, Stored)
        assert 1 <= len(part.sequence_hashes) <= 3
        assert part.parent == (covered[-1] if covered else parent)
        assert (part.start, part.tier) == (start + len(covered), Tier.HOST)
        covered += part.sequence_hashes
    assert covered == whole.sequence_hashes
