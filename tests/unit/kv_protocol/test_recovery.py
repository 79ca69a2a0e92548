from typing import Any

import msgspec
import pytest

from kv_protocol.codec import MESSAGE_BYTES_MAX
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.recovery import (
    DUMP_CHUNKS_MAX,
    BlockColumns,
    DumpChunk,
    HeldBlock,
    RecoverRequest,
    block_columns,
    decode_answer,
    decode_recover_request,
    encode,
)
from tests.dumped import dump_chunks

U64_MAX = 2**64 - 1
CHUNK: dict[str, Any] = {
    "type": "dump",
    "request_id": 1,
    "epoch": 2,
    "last_seq": 3,
    "chunk": 0,
    "of": 1,
    "parents": b"\0" * 16,
    "hashes": b"\1" * 16,
    "tiers": b"\x01\x8f",
}


def rows(n: int) -> list[HeldBlock]:
    """Return a chain of `n` blocks, held on every mixture of tiers in turn."""
    return [HeldBlock(U64_MAX - at, U64_MAX - at + 1 if at else None, at % 15 + 1) for at in range(n)]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 6, 7, 8, 100])
@pytest.mark.parametrize("chunk_blocks", [1, 3, 7])
def test_the_chunks_of_a_dump_hold_each_block_once_and_in_order(n: int, chunk_blocks: int) -> None:
    chunks = dump_chunks(5, 6, 7, rows(n), chunk_blocks=chunk_blocks)
    read = [decode_answer(encode(chunk)) for chunk in chunks]
    assert read == chunks
    assert [block for chunk in chunks for block in chunk.columns.blocks()] == rows(n)
    assert [chunk.chunk for chunk in chunks] == list(range(max(1, -(-n // chunk_blocks))))
    assert {(chunk.request_id, chunk.epoch, chunk.last_seq, chunk.of) for chunk in chunks} == {(5, 6, 7, len(chunks))}
    assert all(len(chunk.tiers) <= chunk_blocks for chunk in chunks)


def test_a_hash_that_is_no_u64_cannot_be_dumped() -> None:
    for block in (HeldBlock(2**64, None, 1), HeldBlock(-1, None, 1), HeldBlock(1, 2**64, 1)):
        with pytest.raises(LimitExceeded, match=r"^hash: "):
            dump_chunks(1, 2, 3, [block])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hashes": b"\1" * 8}, r"columns: found \(16, 8, 2\), allowed 8, 8 and 1 bytes a block"),
        ({"parents": b"\1" * 24}, r"columns: found \(24, 16, 2\), allowed 8, 8 and 1 bytes a block"),
        ({"tiers": b"\1"}, r"columns: found \(16, 16, 1\), allowed 8, 8 and 1 bytes a block"),
        ({"tiers": b""}, r"columns: found \(16, 16, 0\), allowed 8, 8 and 1 bytes a block"),
        ({"hashes": b"\1" * 17}, r"columns: found \(16, 17, 2\), allowed 8, 8 and 1 bytes a block"),
        ({"tiers": b"\x01\x00"}, "tiers: found 0, allowed one of bits 0..3 or more, and bit 7"),
        ({"tiers": b"\x80\x01"}, "tiers: found 128, allowed one of bits 0..3 or more, and bit 7"),
        ({"tiers": b"\x11\x01"}, "tiers: found 17, allowed one of bits 0..3 or more, and bit 7"),
        ({"tiers": b"\x01\x41"}, "tiers: found 65, allowed one of bits 0..3 or more, and bit 7"),
        ({"chunk": 1}, "chunk 1 of 1"),
        ({"chunk": -1}, "chunk -1 of 1"),
        ({"of": 0}, "chunk 0 of 0"),
        ({"of": -1}, "chunk 0 of -1"),
        ({"of": DUMP_CHUNKS_MAX + 1}, f"at most {DUMP_CHUNKS_MAX}"),
        ({"epoch": -1}, r">= 0 - at `\$\.epoch`"),
        ({"last_seq": -1}, r">= 0 - at `\$\.last_seq`"),
        ({"request_id": -1}, r">= 0 - at `\$\.request_id`"),
        ({"epoch": "2"}, r"\$\.epoch"),
        ({"hashes": "text"}, r"\$\.hashes"),
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(change: dict[str, Any], reason: str) -> None:
    assert decode_answer(msgspec.msgpack.encode(CHUNK)) == msgspec.convert(CHUNK, DumpChunk)
    with pytest.raises(MalformedMessage, match=f"answer: .*{reason}"):
        decode_answer(msgspec.msgpack.encode(CHUNK | change))


def test_a_chunk_beyond_the_size_of_a_message_is_refused_unread() -> None:
    n = (MESSAGE_BYTES_MAX + 1024) // 17 + 1
    data = encode(
        msgspec.convert(CHUNK | {"parents": b"\0" * 8 * n, "hashes": b"\0" * 8 * n, "tiers": b"\1" * n}, DumpChunk)
    )
    with pytest.raises(MalformedMessage, match=f"answer: {len(data)} bytes, at most 525312 allowed") as refused:
        decode_answer(data)
    assert refused.value.offset == MESSAGE_BYTES_MAX + 1024


def test_a_request_with_digests_and_a_repair_survive_the_wire() -> None:
    request = RecoverRequest(1, 2, 3, bytes(range(256)) * 32)
    assert decode_recover_request(encode(request)) == request
    (repair,) = dump_chunks(1, 2, 3, [HeldBlock(5, None, 1)], buckets=b"\1" + b"\0" * 31)
    assert decode_answer(encode(repair)) == repair


def test_a_table_or_a_set_of_buckets_of_another_size_is_refused() -> None:
    with pytest.raises(LimitExceeded, match=r"^buckets: found 8, allowed 0 or 8192 bytes"):
        RecoverRequest(1, 2, 3, b"12345678")
    with pytest.raises(LimitExceeded, match=r"^buckets: found 8, allowed 0 or 32 bytes"):
        dump_chunks(1, 2, 3, [], buckets=b"12345678")


def test_a_request_id_is_a_u64_and_columns_have_room_for_a_block() -> None:
    with pytest.raises(MalformedMessage, match=r">= 0 - at `\$\.request_id`"):
        decode_recover_request(encode(RecoverRequest(-1)))
    for chunk_blocks in (0, -1):
        with pytest.raises(LimitExceeded, match=rf"^chunk_blocks: found {chunk_blocks}, allowed 1 or more$"):
            block_columns(rows(1), chunk_blocks)


def test_a_row_names_a_tier_and_no_unknown_bit() -> None:
    for bits in range(256):
        allowed = bool(bits & 0x0F) and not bits & 0x70
        try:
            made = len(BlockColumns(bytes(8), bytes(8), bytes([bits])))
        except LimitExceeded:
            made = 0
        assert made == allowed, bits


def test_a_request_beyond_its_size_is_refused_unread() -> None:
    with pytest.raises(MalformedMessage, match="recover request: 9217 bytes, at most 9216 allowed"):
        decode_recover_request(b"\0" * 9217)
