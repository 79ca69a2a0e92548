"""One rank's blocks in the index, and when the dump of an overfull rank is requested again.

A rank is overfull once the index had no memory for some of its blocks.

    found                                  the dump is requested when
    ------------------------------------   ----------------------------------------------------------------------
    overfull                               memory is at, or nodes are below 0.9 of those when it became overfull
    overfull still, after its dump         memory is at, or nodes are below 0.9 of those after the dump
    not overfull any more                  never: all of its blocks are in the index

Nodes count because an index may keep the memory of removed blocks for later ones. The second row bounds the number of
dumps: after each dump in vain, memory or nodes have to fall by another tenth, also if an index refuses blocks long
before its limit.
"""

from typing import NamedTuple

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.digest import TierDigest, bucket_table
from kv_protocol.events import TIERS, Cleared, Event, Stored
from kv_protocol.recovery import BlockColumns

HEALED_RATIO = 0.9


class Fill(NamedTuple):
    """How full an index is."""

    memory_bytes: int
    nodes: int

    def is_fall_from(self, full: "Fill") -> bool:
        """Return whether there may be memory again for blocks that were refused at `full`."""
        return self.memory_bytes <= HEALED_RATIO * full.memory_bytes or self.nodes < HEALED_RATIO * full.nodes


class RankBlocks:
    """The blocks in one slot of the index. Changes return the number of blocks that there was no memory for."""

    __slots__ = ("_index", "slot")

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self._index, self.slot = index, slot

    def apply(self, event: Event, now_s: float) -> int:
        """Apply one event."""
        if isinstance(event, Stored):
            return self._index.store(self.slot, event.parent, event.sequence_hashes, event.tier, now_s)
        if isinstance(event, Cleared):
            self._index.clear(self.slot, event.tier)
        else:
            self._index.remove(self.slot, event.sequence_hashes, event.tier)
        return 0

    def apply_message(self, message: bytes, now_s: float) -> int:
        """Apply the events of a valid message, undecoded."""
        return self._index.apply_batch(self.slot, message, now_s)

    def replace(self, chunks: tuple[BlockColumns, ...], now_s: float) -> int:
        """Replace all blocks by those of the chunks, parents first."""
        return self._index.load(self.slot, chunks, now_s)

    def repair(self, buckets: bytes, chunks: tuple[BlockColumns, ...], now_s: float) -> int:
        """Replace the blocks in these buckets by those of the chunks."""
        return self._index.repair(self.slot, buckets, chunks, now_s)

    def digests(self) -> tuple[TierDigest, ...]:
        """Return the digest of each tier, in order."""
        return tuple(self._index.digest(self.slot, tier) for tier in TIERS)

    def table(self) -> bytes:
        """Return the digests of all buckets of all tiers."""
        return bucket_table(self._index.bucket_digests(self.slot, tier) for tier in TIERS)

    def dump(self) -> tuple[BlockColumns, ...]:
        """Return all blocks, parents first."""
        return tuple(self._index.dump(self.slot))

    def fill(self) -> Fill:
        """Return how full the index is."""
        statistics = self._index.statistics()
        return Fill(statistics.memory_bytes, statistics.nodes)
