"""The blocks of one rank in the reference index: sequence hash to bits of tiers, and a digest of each tier."""

from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Tier


class RankHolding:
    """The blocks of one rank."""

    __slots__ = ("digests", "held")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.digests = tuple(SetDigest() for _ in TIERS)

    def has(self, sequence_hash: int, tier: Tier) -> bool:
        """Return whether the block is held on `tier`."""
        return bool(self.held.get(sequence_hash, 0) >> tier & 1)

    def on(self, tier: Tier) -> list[int]:
        """Return the blocks held on `tier`."""
        return [sequence_hash for sequence_hash, bits in self.held.items() if bits >> tier & 1]

    def add(self, sequence_hash: int, tier: Tier) -> int:
        """Add the block on `tier`; return the bits of the tiers that it was held on before."""
        bits = self.held.get(sequence_hash, 0)
        if not bits >> tier & 1:
            self.held[sequence_hash] = bits | 1 << tier
            self.digests[tier].add(sequence_hash)
        return bits

    def discard(self, sequence_hash: int, tier: Tier) -> int | None:
        """Remove the block on `tier`; return the bits of the remaining tiers, None if it was not held there."""
        bits = self.held.get(sequence_hash, 0)
        if not bits >> tier & 1:
            return None
        bits &= ~(1 << tier)
        if bits:
            self.held[sequence_hash] = bits
        else:
            del self.held[sequence_hash]
        self.digests[tier].discard(sequence_hash)
        return bits
