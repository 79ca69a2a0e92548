"""A checkpoint: the fold at one place in the log, in bytes. A restored fold continues from there.

    checkpoint = b"KVCHECKP" | version u32 = 1, little-endian | xxh3_64(body) u64 | body
    body       = msgpack [stream_created, stream_seq, wall_ns, ranks, index]
    rank       = [worker_id, dp_rank, slot, epoch, seq, logged_seq, stale, instance]
    index      = the snapshot of `indexer/index/snapshot.py`, in which a rank is known by its slot

The state of a rank is that at its own place, `seq` of `epoch`. The log brought it there, or an answer did (`seq >
logged_seq`); after an answer, the next batches of the log are duplicates. Open questions and early batches are not
stored: the next heartbeat or batch finds what is missing.
"""

import struct
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.index.prefix_index import RANK_MAX
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import I64_LIMIT
from kv_protocol.ids import U64, DpRank, WorkerId, WorkerRank

MAGIC = b"KVCHECKP"
VERSION = 1
_HEAD = struct.Struct("<8sIQ")


class RankCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """One rank: its slot in the index, its place in its stream, and why it was stale.

    If nothing was received, `epoch` and `seq` are 0.
    """

    worker_id: WorkerId
    dp_rank: DpRank
    slot: Annotated[int, msgspec.Meta(ge=0, le=RANK_MAX)]
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

    No two ranks have the same name or the same slot.
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
