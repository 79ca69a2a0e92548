"""How a reader that lost its place gets the whole state back: ask the rank's consolidator, get a dump in chunks.

    request = msgpack {request_id}
    chunk   = msgpack {request_id, epoch, last_seq, chunk, of, parents, hashes, tiers}

`parents`, `hashes` (little-endian u64s) and `tiers` (bytes: bit 0..3 = tier held, bit 7 = has a parent) are columns of
one row a block, parents before children over the whole dump. The dump is the state after `last_seq`: subscribe first,
ask second, then drain what came in between.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from kv_protocol.codec import MESSAGE_BYTES_MAX, pack_u64, unpack_u64
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import TIERS, Tier
from kv_protocol.ids import checked_u64

CHUNK_BLOCKS_MAX = 28_000
"""17 bytes a block: a full chunk stays below a message's 512 KiB."""
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


def parents_first(parents: Mapping[int, int | None]) -> Iterator[int]:
    """Yield every key of `parents` (block -> its parent), each after its parent if that is a key too. O(n)."""
    seen: set[int] = set()
    for block in parents:
        chain: list[int] = []
        at: int | None = block
        while at is not None and at in parents and at not in seen:
            seen.add(at)
            chain.append(at)
            at = parents[at]
        yield from reversed(chain)


class BlockColumns(msgspec.Struct, frozen=True):
    """Blocks that a rank holds, as the columns of a chunk: parents first where there are several in a row."""

    parents: bytes
    hashes: bytes
    tiers: bytes

    def __post_init__(self) -> None:
        _check_columns(self.parents, self.hashes, self.tiers)

    def __len__(self) -> int:
        return len(self.tiers)

    def blocks(self) -> Iterator[HeldBlock]:
        """Yield the rows."""
        for sequence_hash, parent, bits in zip(
            unpack_u64(self.hashes), unpack_u64(self.parents), self.tiers, strict=True
        ):
            yield HeldBlock(sequence_hash, parent if bits & _HAS_PARENT else None, bits & _TIER_BITS)


def _check_columns(parents: bytes, hashes: bytes, tiers: bytes) -> None:
    n = len(tiers)
    if len(hashes) != 8 * n or len(parents) != 8 * n:
        raise LimitExceeded("columns", (len(parents), len(hashes), n), "8, 8 and 1 bytes a block")
    if unknown := tiers.translate(None, _ROW_BITS):
        raise LimitExceeded("tiers", unknown[0], "one of bits 0..3 or more, and bit 7")


def block_columns(blocks: Iterable[HeldBlock], chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
    """Yield the columns of `blocks`, in order, at most `chunk_blocks` in each; of none, nothing.

    Raises:
        LimitExceeded: `chunk_blocks` is less than 1; later, where a block cannot be a row.
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


_NO_BLOCKS = BlockColumns(b"", b"", b"")


class DumpRequest(msgspec.Struct, frozen=True):
    """Ask for a dump; chunks carry the same id, so that an answer to an earlier question is not mistaken for this."""

    request_id: int

    def __post_init__(self) -> None:
        checked_u64("request_id", self.request_id)


class DumpChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part `chunk` of `of` of a rank's state after `last_seq` of `epoch`."""

    request_id: int
    epoch: int
    last_seq: int
    chunk: int
    of: int
    parents: bytes
    hashes: bytes
    tiers: bytes

    def __post_init__(self) -> None:
        for field in ("request_id", "epoch", "last_seq"):
            checked_u64(field, getattr(self, field))
        _check_columns(self.parents, self.hashes, self.tiers)
        if not 0 <= self.chunk < self.of:
            raise ValueError(f"chunk {self.chunk} of {self.of}")

    @property
    def columns(self) -> BlockColumns:
        """The rows, parents first, as they are stored."""
        return BlockColumns(self.parents, self.hashes, self.tiers)

    def blocks(self) -> Iterator[HeldBlock]:
        """Yield the rows, parents first."""
        return self.columns.blocks()


def dump_chunks(
    request_id: int, epoch: int, last_seq: int, blocks: Iterable[HeldBlock], *, chunk_blocks: int = CHUNK_BLOCKS_MAX
) -> list[DumpChunk]:
    """Return the chunks of a dump, at least one; `blocks` come parents first."""
    parts = list(block_columns(blocks, chunk_blocks)) or [_NO_BLOCKS]
    return [
        DumpChunk(
            request_id=request_id,
            epoch=epoch,
            last_seq=last_seq,
            chunk=index,
            of=len(parts),
            parents=part.parents,
            hashes=part.hashes,
            tiers=part.tiers,
        )
        for index, part in enumerate(parts)
    ]


_request_decoder = msgspec.msgpack.Decoder(DumpRequest)
_chunk_decoder = msgspec.msgpack.Decoder(DumpChunk)
_encode = msgspec.msgpack.Encoder().encode


def encode(message: DumpRequest | DumpChunk) -> bytes:
    """Return the msgpack of a request or a chunk."""
    return _encode(message)


def decode_dump_request(data: bytes) -> DumpRequest:
    """Return the request in `data`; raise `MalformedMessage` for anything else."""
    try:
        return _request_decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"dump request: {error}") from error


def decode_dump_chunk(data: bytes) -> DumpChunk:
    """Return the chunk in `data`; raise `MalformedMessage` for anything else."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(MESSAGE_BYTES_MAX, f"dump chunk of {len(data)} bytes")
    try:
        return _chunk_decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"dump chunk: {error}") from error
