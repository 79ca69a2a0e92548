"""A checkpoint: the fold at one place in the log, in bytes. A restored fold continues from there.

    checkpoint = b"KVCHECKP" | version u32 = 1, little-endian | xxh3_64(body) u64 | body
    body       = msgpack [stream_created, stream_seq, wall_ns, ranks, index]
    rank       = [worker_id, dp_rank, slot, epoch, seq, logged_seq, stale, instance]
    index      = the snapshot of `indexer/index/snapshot.py`, in which a rank's number is its slot

A rank's blocks are those at its own place, `seq` of `epoch`. The log brought the rank there, or an answer did (`seq >
logged_seq`); after an answer, the next batches of the log are duplicates. Open questions and early batches are not
stored: the next heartbeat or batch shows that something is missing.

The state of one rank at one moment, for comparison and display:

    state    = msgpack {worker_id, dp_rank, epoch, seq, logged_seq, stale, digests, chunks}
    digest   = [tier, blocks, digest], of each of the four tiers, in their order
    chunk    = {parents, hashes, tiers}, the columns of `kv_protocol/recovery.py`, parents first over all chunks

`digests` are the ones that the index keeps beside its blocks; they are not computed from `chunks`.
"""

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.index.prefix_index import RANKS_MAX
from kv_protocol.digest import TierDigest
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import I64_LIMIT, TIERS
from kv_protocol.ids import U64, DpRank, WorkerId, WorkerRank
from kv_protocol.recovery import BlockColumns, HeldBlock

MAGIC = b"KVCHECKP"
VERSION = 1
_HEAD = struct.Struct("<8sIQ")


class RankCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """One rank: its slot in the index, its place in its stream, and why it was stale.

    If nothing was received, `epoch` and `seq` are 0.
    """

    worker_id: WorkerId
    dp_rank: DpRank
    slot: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
    epoch: U64
    seq: U64
    logged_seq: U64
    stale: str
    instance: str

    @property
    def rank(self) -> WorkerRank:
        """The rank that this describes."""
        return WorkerRank(self.worker_id, self.dp_rank)


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The fold after message `stream_seq` of the stream created at `stream_created`, taken at `wall_ns`.

    No two ranks may have the same name or the same slot.
    """

    stream_created: str
    stream_seq: U64
    wall_ns: Annotated[int, msgspec.Meta(ge=-I64_LIMIT, le=I64_LIMIT - 1)]
    ranks: tuple[RankCheckpoint, ...]
    index: bytes

    def __post_init__(self) -> None:
        for field, found in (
            ("ranks", [each.rank for each in self.ranks]),
            ("slots", [each.slot for each in self.ranks]),
        ):
            if len(set(found)) < len(found):
                raise LimitExceeded(field, "one of them twice", "each once")


_decoder = msgspec.msgpack.Decoder(Checkpoint)
_encode = msgspec.msgpack.Encoder().encode


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint."""
    body = _encode(checkpoint)
    return _HEAD.pack(MAGIC, VERSION, xxh3_64_intdigest(body)) + body


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Return the checkpoint in `data`; raise `MalformedMessage` for anything else, also for a damaged one."""
    if len(data) < _HEAD.size:
        raise MalformedMessage(0, f"{len(data)} bytes, the head of a checkpoint needs {_HEAD.size}")
    magic, version, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise MalformedMessage(0, "no checkpoint")
    if version != VERSION:
        raise MalformedMessage(8, f"version {version}, only {VERSION} is known")
    body = memoryview(data)[_HEAD.size :]
    if checksum != xxh3_64_intdigest(body):
        raise MalformedMessage(12, "the checksum is not that of the body")
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise MalformedMessage(_HEAD.size, f"checkpoint: {error}") from error


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place in its stream, and its blocks there; `logged_seq`, `stale`: as in `FollowerStatistics`."""

    worker_id: WorkerId
    dp_rank: DpRank
    epoch: U64
    seq: U64
    logged_seq: U64
    stale: str
    digests: tuple[TierDigest, ...]
    chunks: tuple[BlockColumns, ...]

    def __post_init__(self) -> None:
        if (found := tuple(digest.tier for digest in self.digests)) != TIERS:
            raise LimitExceeded("digests", found, "one of each tier, in order")

    @property
    def rank(self) -> WorkerRank:
        """The rank that this describes."""
        return WorkerRank(self.worker_id, self.dp_rank)

    def place(self) -> dict[str, object]:
        """Return the rank, its place in its stream and why it is stale, by field."""
        return {name: getattr(self, name) for name in ("worker_id", "dp_rank", "epoch", "seq", "logged_seq", "stale")}

    @property
    def block_counts(self) -> dict[str, int]:
        """The number of blocks by tier name."""
        return {digest.tier.name.lower(): digest.block_count for digest in self.digests}

    def blocks(self) -> Iterator[HeldBlock]:
        """Yield the rank's blocks, parents first."""
        for chunk in self.chunks:
            yield from chunk.blocks()


encode_state = _encode
"""Returns the msgpack of a state."""
_state_decoder = msgspec.msgpack.Decoder(RankState)


def decode_state(data: bytes) -> RankState:
    """Return the state in `data`; raise `MalformedMessage` for anything else."""
    try:
        return _state_decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"state of a rank: {error}") from error
