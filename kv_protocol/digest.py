"""Order-free digests of sets of sequence hashes: equal digests prove equal sets (but for a 2^-64 accident).

    digest of a set = sum of splitmix64(hash) mod 2^64, kept per tier in 256 buckets by the hash's top byte

Both ends of a stream keep one in O(1) a block. Source: `interfaces.md`, "Canonical batch".
"""

from collections.abc import Iterable

import msgspec

from kv_protocol.events import Tier
from kv_protocol.ids import checked_u64
from kv_protocol.splitmix import U64_MASK, splitmix64

BUCKETS = 256


class TierDigest(msgspec.Struct, frozen=True, array_like=True):
    """What a heartbeat says of one tier: how many blocks, and their digest (u64)."""

    tier: Tier
    block_count: int
    digest: int

    def __post_init__(self) -> None:
        checked_u64("block_count", self.block_count)
        checked_u64("digest", self.digest)


class SetDigest:
    """The digest of a set that its owner changes block by block; `add` new members and `discard` old ones only."""

    __slots__ = ("_buckets", "block_count")

    def __init__(self, members: Iterable[int] = ()) -> None:
        self._buckets = [0] * BUCKETS
        self.block_count = 0
        for member in members:
            self.add(member)

    def add(self, sequence_hash: int) -> None:
        """Count a block in."""
        self._buckets[sequence_hash >> 56] += splitmix64(sequence_hash)
        self.block_count += 1

    def discard(self, sequence_hash: int) -> None:
        """Count a block out."""
        self._buckets[sequence_hash >> 56] -= splitmix64(sequence_hash)
        self.block_count -= 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """The digest of each bucket, by the top byte of the hash."""
        return tuple(total & U64_MASK for total in self._buckets)

    @property
    def total(self) -> int:
        """The digest of the whole set."""
        return sum(self._buckets) & U64_MASK

    def of_tier(self, tier: Tier) -> TierDigest:
        """Return what a heartbeat says of this set."""
        return TierDigest(tier, self.block_count, self.total)
