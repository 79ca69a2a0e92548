"""The state of one rank at one moment: for comparison, storage and display.

    state    = msgpack {worker_id, dp_rank, epoch, seq, logged_seq, stale, digests, chunks}
    digest   = [tier, blocks, digest], of each of the four tiers, in their order
    chunk    = {parents, hashes, tiers}, the columns of `kv_protocol/recovery.py`, parents first over all chunks

`digests` are those that the index keeps beside its blocks; they are not computed from the blocks.
"""

from collections.abc import Iterator

import msgspec

from kv_protocol.digest import TierDigest
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import TIERS
from kv_protocol.ids import U64, DpRank, WorkerId, WorkerRank
from kv_protocol.recovery import BlockColumns, HeldBlock


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place in its stream, and its blocks there; `logged_seq` and `stale` are the follower's."""

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


_decoder = msgspec.msgpack.Decoder(RankState)
encode_state = msgspec.msgpack.Encoder().encode
"""Returns the msgpack of a state."""


def decode_state(data: bytes) -> RankState:
    """Return the state in `data`; raise `MalformedMessage` for anything else."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"state of a rank: {error}") from error
