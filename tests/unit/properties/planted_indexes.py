"""Prefix indexes with one bug each: a harness that passes one of them is no harness."""

from collections.abc import Iterable, Sequence

from indexer.index.buffers import checked_hashes
from indexer.index.parked_blocks import ParkedBlock
from indexer.index.prefix_index import Depths, Hashes
from indexer.index.reference import ReferenceIndex
from indexer.index.reference_nodes import Forest, Node
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import BlockColumns
from tests.support.planting import inside


class TruncatesAtRemovals(ReferenceIndex):
    """A rank that loses a block loses the blocks beyond it."""

    def _remove(self, rank: int, hashes: Sequence[int], tier: Tier) -> None:
        for sequence_hash in hashes:
            super()._remove(rank, [sequence_hash], tier)
            rows = [block for columns in self.dump(rank) for block in columns.blocks()]
            if beyond := [block.sequence_hash for block in rows if block.parent == sequence_hash]:
                self._remove(rank, beyond, tier)


class RootsOrphans(ReferenceIndex):
    """What should be parked becomes a root."""

    def _store(self, rank: int, parent: int | None, hashes: Sequence[int], tier: Tier, now_s: float) -> int:
        return super()._store(rank, parent if parent in self._nodes else None, hashes, tier, now_s)


class HoldsOrphans(ReferenceIndex):
    """An overcount, for a store is believed like a dump."""

    def _store(self, rank: int, parent: int | None, hashes: Sequence[int], tier: Tier, now_s: float) -> int:
        for sequence_hash in hashes:
            self._attach(rank, parent, sequence_hash, 1 << tier, now_s)
            parent = sequence_hash
        return 0


class DropsOrphans(ReferenceIndex):
    """An undercount, for what should be parked is forgotten."""

    def _store(self, rank: int, parent: int | None, hashes: Sequence[int], tier: Tier, now_s: float) -> int:
        if parent is None or parent in self._nodes:
            return super()._store(rank, parent, hashes, tier, now_s)
        return 0


class ParksWholeEvents(ReferenceIndex):
    """A block whose parent is known waits because the head of its event does."""

    def _store(self, rank: int, parent: int | None, hashes: Sequence[int], tier: Tier, now_s: float) -> int:
        if parent is None or parent in self._nodes:
            return super()._store(rank, parent, hashes, tier, now_s)
        for sequence_hash in hashes:
            self._parked.park(ParkedBlock(rank, sequence_hash, tier), parent, now_s)
            parent = sequence_hash
        return 0


class WaitsForUnheldParentsInVain(ReferenceIndex):
    """A parked block stays parked when its parent comes as the unheld parent of a dump."""

    def _attach(self, rank: int, parent: int | None, sequence_hash: int, tier_bits: int, now_s: float) -> bool:
        self._insert(rank, parent, sequence_hash, tier_bits, now_s)
        for block in self._parked.take(sequence_hash):
            self._attach(block.rank, sequence_hash, block.sequence_hash, 1 << block.tier, now_s)
        return True


class IgnoresTiersOfRemovals(ReferenceIndex):
    """A removal from one tier is one from all."""

    def _remove(self, rank: int, hashes: Sequence[int], tier: Tier) -> None:
        super()._remove(rank, hashes, tier)
        for sequence_hash in hashes:
            for other in TIERS:
                self._release(rank, sequence_hash, other)


class MatchesEachTierAlone(ReferenceIndex):
    """Depth t counts blocks on tier t only."""

    def overlaps(self, sequence_hashes: Hashes) -> dict[int, Depths]:
        alone = {}
        for rank in super().overlaps(sequence_hashes):
            held, hashes = self._ranks[rank].held, checked_hashes(sequence_hashes)
            depths = [
                next((at for at, each in enumerate(hashes) if not held.get(each, 0) >> tier & 1), len(hashes))
                for tier in TIERS
            ]
            alone[rank] = (depths[0], depths[1], depths[2], depths[3])
        return alone


class MatchesAcrossHoles(ReferenceIndex):
    """An overcount, for blocks beyond a hole are counted."""

    def overlaps(self, sequence_hashes: Hashes) -> dict[int, Depths]:
        held = {rank: self._ranks[rank].held for rank in self._ranks}
        return {
            rank: (*each[:3], sum(block in held[rank] for block in checked_hashes(sequence_hashes)))
            for rank, each in super().overlaps(sequence_hashes).items()
        }


class SeesSixtyFourRanks(ReferenceIndex):
    """The set of holders is one machine word."""

    def _hold(self, rank: int, sequence_hash: int, node: Node, tier: Tier) -> None:
        super()._hold(rank, sequence_hash, node, tier)
        node.holders = [bits & 2**64 - 1 for bits in node.holders]


class KeepsDigestsOfTheRemoved(ReferenceIndex):
    """A removal does not change the digest."""

    def _release(self, rank: int, sequence_hash: int, tier: Tier) -> bool:
        released = super()._release(rank, sequence_hash, tier)
        if released:
            self._ranks[rank].digests[tier].add(sequence_hash)
        return released


class CountsDuplicatesIntoDigests(ReferenceIndex):
    """A block that is stored twice is twice in the digest."""

    def _hold(self, rank: int, sequence_hash: int, node: Node, tier: Tier) -> None:
        before = self._duplicates
        super()._hold(rank, sequence_hash, node, tier)
        if self._duplicates > before:
            self._ranks[rank].digests[tier].add(sequence_hash)


class LosesRefills(ReferenceIndex):
    """The refill of a hole is taken for a duplicate."""

    def _insert(self, rank: int, parent: int | None, sequence_hash: int, tier_bits: int, now_s: float) -> bool:
        node = self._nodes.get(sequence_hash)
        if node is None or any(node.holders) or not node.parent_known:
            return super()._insert(rank, parent, sequence_hash, tier_bits, now_s)
        return True


class DropLeavesHolders(ReferenceIndex):
    """The blocks of a rank outlive it."""

    def drop(self, rank: int) -> None:
        self._ranks.pop(rank, None)


class LoadMerges(ReferenceIndex):
    """A dump is added to what was held."""

    def load(self, rank: int, chunks: Iterable[BlockColumns], now_s: float) -> None:
        for block in (block for columns in chunks for block in columns.blocks()):
            self._attach(rank, block.parent, block.sequence_hash, block.tier_bits, now_s)


class ClearKeepsParked(ReferenceIndex):
    """What was parked before a clear is held after it."""

    def _clear(self, rank: int, tier: Tier) -> None:
        for block in self._ranks[rank].on(tier):
            self._release(rank, block, tier)


class LeakyForest(Forest):
    """A forest that forgets a node, and not its parents."""

    def prune(self, sequence_hash: int) -> None:
        node = self[sequence_hash]
        if not node.child_count and not any(node.holders):
            del self[sequence_hash]
            if node.parent is not None:
                self[node.parent].child_count -= 1


class LeaksParents(ReferenceIndex):
    """A parent that no rank holds outlives its last child."""

    def __init__(self, *, parked_blocks_max: int = 65_536, parked_ttl_s: float = 5.0) -> None:
        super().__init__(parked_blocks_max=parked_blocks_max, parked_ttl_s=parked_ttl_s)
        self._nodes = LeakyForest()


class BlamesTheCleared(ReferenceIndex):
    """A rank is named for what it lost before it began anew."""

    def _clear(self, rank: int, tier: Tier) -> None:
        lost = set(inside(self._parked, "_losers"))
        super()._clear(rank, tier)
        inside(self._parked, "_losers").update(lost)


PLANTED: tuple[type[ReferenceIndex], ...] = (
    TruncatesAtRemovals,
    RootsOrphans,
    HoldsOrphans,
    DropsOrphans,
    ParksWholeEvents,
    WaitsForUnheldParentsInVain,
    IgnoresTiersOfRemovals,
    MatchesEachTierAlone,
    MatchesAcrossHoles,
    SeesSixtyFourRanks,
    KeepsDigestsOfTheRemoved,
    CountsDuplicatesIntoDigests,
    LosesRefills,
    DropLeavesHolders,
    LoadMerges,
    ClearKeepsParked,
    LeaksParents,
    BlamesTheCleared,
)
"""Bugs that every harness must find."""
