"""Recovery of a reader with missing batches or doubtful blocks: a request to the rank's consolidator.

    request = msgpack {request_id, epoch, after_seq, buckets}
    answer  = replay chunks, or dump chunks, each msgpack with a `type`

    request with                          answer
    -----------------------------------   ------------------------------------------------------------------------
    digests of buckets, the same epoch    *repair*: the blocks of the buckets whose digests differ now
    the same epoch; the batches after     *replay*: the batches after `after_seq`, as they were published, up to
      `after_seq` are all kept, and no      `last_seq`
      larger than a dump
    anything else                         *dump*: all blocks

    replay chunk = {type "replay", request_id, epoch, last_seq, message}   `message`: a canonical message, or nothing
    dump chunk   = {type "dump", request_id, epoch, last_seq, chunk, of, parents, hashes, tiers, buckets}

`parents`, `hashes` (little-endian u64s) and `tiers` (bytes: bit 0..3 = tier held, bit 7 = has a parent) are columns of
one row per block, parents before children over the whole answer. A dump is the state after `last_seq`: subscribe first,
send the request second, then apply what came in between. `buckets` of a dump chunk is empty, or names by bits (bucket b
is bit b & 7 of byte b >> 3) the buckets in a *repair*; the requester's other buckets are right. Equal digests of a
bucket mean equal sets, so a repair is right if the requester's blocks did not change since the request.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from kv_protocol.codec import MESSAGE_BYTES_MAX, pack_u64, unpack_u64
from kv_protocol.digest import BUCKET_SET_BYTES, BUCKET_TABLE_BYTES
from kv_protocol.errors import LimitExceeded, decoder_of
from kv_protocol.events import TIERS, Tier
from kv_protocol.ids import U64

CHUNK_BLOCKS_MAX = 28_000
"""17 bytes a block: a full chunk stays below a message's 512 KiB."""
DUMP_CHUNKS_MAX = 4096
"""The most parts of an answer (33 million blocks, as agents send them): bounds what a reader keeps of an open one."""
_ENVELOPE_BYTES_MAX = 1024
"""Bound on all but blocks, batches, digests. NATS servers allow `MESSAGE_BYTES_MAX` plus more than twice this."""
_HAS_PARENT = 0x80
_TIER_BITS = 0x0F
_ROW_BITS = bytes(parent | tiers for parent in (0, _HAS_PARENT) for tiers in range(1, _TIER_BITS + 1))


class HeldBlock(NamedTuple):
    """A block of a dump; `tier_bits` has bit t set when the rank holds it on tier t."""

    sequence_hash: int
    parent: int | None
    tier_bits: int

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that hold the block."""
        return tuple(tier for tier in TIERS if self.tier_bits >> tier & 1)


class BlockColumns(msgspec.Struct, frozen=True):
    """Blocks of a rank as columns: parents come before children, over all chunks of an answer."""

    parents: bytes
    hashes: bytes
    tiers: bytes

    def __post_init__(self) -> None:
        n = len(self.tiers)
        if len(self.hashes) != 8 * n or len(self.parents) != 8 * n:
            raise LimitExceeded("columns", (len(self.parents), len(self.hashes), n), "8, 8 and 1 bytes a block")
        if unknown := self.tiers.translate(None, _ROW_BITS):
            raise LimitExceeded("tiers", unknown[0], "one of bits 0..3 or more, and bit 7")

    def __len__(self) -> int:
        return len(self.tiers)

    def blocks(self) -> Iterator[HeldBlock]:
        """Yield the rows."""
        for sequence_hash, parent, bits in zip(
            unpack_u64(self.hashes), unpack_u64(self.parents), self.tiers, strict=True
        ):
            yield HeldBlock(sequence_hash, parent if bits & _HAS_PARENT else None, bits & _TIER_BITS)


_NO_BLOCKS = BlockColumns(b"", b"", b"")


def block_columns(blocks: Iterable[HeldBlock], chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
    """Yield the columns of `blocks`, in order, at most `chunk_blocks` in each; nothing for no blocks.

    Raises:
        LimitExceeded: `chunk_blocks` is less than 1; or, while the result is read, a block cannot be a row.
    """
    if chunk_blocks < 1:
        raise LimitExceeded("chunk_blocks", chunk_blocks, "1 or more")
    rows = iter(blocks)
    return iter(lambda: _columns(list(islice(rows, chunk_blocks))), _NO_BLOCKS)


def _columns(rows: list[HeldBlock]) -> BlockColumns:
    return BlockColumns(
        parents=pack_u64([row.parent or 0 for row in rows]),
        hashes=pack_u64([row.sequence_hash for row in rows]),
        tiers=bytes(row.tier_bits | (0 if row.parent is None else _HAS_PARENT) for row in rows),
    )


class RecoverRequest(msgspec.Struct, frozen=True):
    """Request the state after `after_seq` of `epoch`; with epoch 0 the requester has no place, and needs all blocks.

    `buckets` is empty, or the `bucket_table` of the requester's blocks. Answers repeat `request_id`, which separates
    them from answers to earlier requests.
    """

    request_id: U64
    epoch: U64 = 0
    after_seq: U64 = 0
    buckets: bytes = b""

    def __post_init__(self) -> None:
        if len(self.buckets) not in (0, BUCKET_TABLE_BYTES):
            raise LimitExceeded("buckets", len(self.buckets), f"0 or {BUCKET_TABLE_BYTES} bytes")


class ReplayChunk(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """Consecutive batches of `epoch`, as they were published; the answer ends with `last_seq`, the newest of the epoch.

    `message` is empty if the requester has all batches.
    """

    request_id: U64
    epoch: U64
    last_seq: U64
    message: bytes


class DumpChunk(msgspec.Struct, frozen=True, kw_only=True, tag="dump"):
    """Part `chunk` of `of` parts of a rank's state after `last_seq` of `epoch`: all blocks, or those in `buckets`."""

    request_id: U64
    epoch: U64
    last_seq: U64
    chunk: int
    of: int
    parents: bytes
    hashes: bytes
    tiers: bytes
    buckets: bytes = b""

    def __post_init__(self) -> None:
        if len(self.buckets) not in (0, BUCKET_SET_BYTES):
            raise LimitExceeded("buckets", len(self.buckets), f"0 or {BUCKET_SET_BYTES} bytes")
        _ = self.columns
        if not 0 <= self.chunk < self.of <= DUMP_CHUNKS_MAX:
            raise ValueError(f"chunk {self.chunk} of {self.of}, at most {DUMP_CHUNKS_MAX} allowed")

    @property
    def columns(self) -> BlockColumns:
        """The blocks of this part, parents before children; raises `LimitExceeded` if the columns are invalid."""
        return BlockColumns(self.parents, self.hashes, self.tiers)


Answer = ReplayChunk | DumpChunk


_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
encode: Callable[[RecoverRequest | Answer], bytes] = msgspec.msgpack.Encoder().encode
decode_recover_request = decoder_of(
    "recover request", msgspec.msgpack.Decoder(RecoverRequest).decode, BUCKET_TABLE_BYTES + _ENVELOPE_BYTES_MAX
)
decode_answer = decoder_of("answer", _answer_decoder.decode, MESSAGE_BYTES_MAX + _ENVELOPE_BYTES_MAX)
