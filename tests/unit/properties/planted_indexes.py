"""Prefix indexes with one bug each, which the scenarios must find."""

from collections.abc import Sequence

from kv_protocol.events import Tier
from tests.reference.index.index import ReferenceIndex
from tests.reference.index.nodes import Forest, Node


class TruncatesAtRemovals(ReferenceIndex):
    """A rank that loses a block loses the blocks beyond it."""

    def _remove(self, rank: int, hashes: Sequence[int], tier: Tier) -> None:
        for sequence_hash in hashes:
            super()._remove(rank, [sequence_hash], tier)
            rows = [block for columns in self.dump(rank) for block in columns.blocks()]
            if beyond := [block.sequence_hash for block in rows if block.parent == sequence_hash]:
                self._remove(rank, beyond, tier)


class FickleForest(Forest):
    """A forest in which the latest store decides a block's parent."""

    def link(self, sequence_hash: int, parent: int | None, now_s: float) -> Node:
        node = super().link(sequence_hash, parent, now_s)
        if node.parent != parent and parent in self and not self._leads_to(parent, sequence_hash):
            if node.parent is not None:
                self[node.parent].child_count -= 1
            node.parent = parent
            self._adopt(parent, now_s)
        return node


class BelievesTheLast(ReferenceIndex):
    """Another parent of a block is counted, and believed: it shows only where hashes contradict each other."""

    def __init__(self, *, parked_blocks_max: int = 65_536, parked_ttl_s: float = 5.0) -> None:
        super().__init__(parked_blocks_max=parked_blocks_max, parked_ttl_s=parked_ttl_s)
        self._nodes = FickleForest()
