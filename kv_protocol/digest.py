"""Order-free digests of sets of sequence hashes: equal digests prove equal sets (up to a 2^-64 accident).

    digest of a set = sum of splitmix64(hash) mod 2^64, kept per tier in 256 buckets by the hash's top byte

    table of a rank  = the digests of all buckets of all tiers, tier by tier: 4 x 256 u64, little-endian
    set of buckets   = 256 bits, bucket b is bit b & 7 of byte b >> 3

Both ends of a stream keep the digest of its blocks, in O(1) per change. Source: `docs/WIRE.md`.
"""

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from kv_protocol.events import TIERS, Tier
from kv_protocol.ids import U64
from kv_protocol.splitmix import U64_MASK, splitmix64

BUCKETS = 256
BUCKET_TABLE_BYTES = 8 * BUCKETS * len(TIERS)
BUCKET_SET_BYTES = BUCKETS // 8


class TierDigest(msgspec.Struct, frozen=True, array_like=True):
    """One tier in a heartbeat: its number of blocks, and their digest."""

    tier: Tier
    block_count: U64
    digest: U64


class SetDigest:
    """The digest of a set, changed block by block; `add` only new members and `discard` only present ones."""

    __slots__ = ("_buckets", "block_count")

    def __init__(self, members: Iterable[int] = ()) -> None:
        self._buckets = [0] * BUCKETS
        self.block_count = 0
        for member in members:
            self.add(member)

    def add(self, sequence_hash: int) -> None:
        """Add a block that is not in the set."""
        self._buckets[sequence_hash >> 56] += splitmix64(sequence_hash)
        self.block_count += 1

    def discard(self, sequence_hash: int) -> None:
        """Remove a block that is in the set."""
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
        """Return this set's entry of a heartbeat."""
        return TierDigest(tier, self.block_count, self.total)


def bucket_table(tiers: Iterable[Sequence[int]]) -> bytes:
    """Return the table made of the bucket digests of all four tiers, which must be in order."""
    return array("Q", [digest for buckets in tiers for digest in buckets]).tobytes()


def differing_buckets(table: bytes, other: bytes) -> bytes:
    """Return the set of the buckets that differ on some tier between two tables."""
    differing = bytearray(BUCKET_SET_BYTES)
    for at in range(0, BUCKET_TABLE_BYTES, 8):
        if table[at : at + 8] != other[at : at + 8]:
            bucket = at // 8 % BUCKETS
            differing[bucket >> 3] |= 1 << (bucket & 7)
    return bytes(differing)


def is_in_buckets(sequence_hash: int, buckets: bytes) -> bool:
    """Return whether a block is in a set of buckets."""
    bucket = sequence_hash >> 56
    return bool(buckets[bucket >> 3] >> (bucket & 7) & 1)
