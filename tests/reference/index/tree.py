"""The data structures of a reference index: nodes, holders, memory.

    nodes:  sequence hash -> parent, number of children, per tier a bit set of the ranks that hold it
    ranks:  rank -> sequence hash -> bits of tiers, and digests

Memory is estimated: a node, a holding (a block at a rank) and a rank cost fixed numbers of bytes, as
measured with `tracemalloc` on CPython 3.11; bit sets of very many ranks cost more than this estimate.
"""

from collections.abc import Sequence

from indexer.index.prefix_index import IndexFull
from kv_protocol.events import TIERS, Tier
from tests.reference.index.nodes import Forest, Node, RankHolding
from tests.reference.index.snapshot import Snapshot, rebuilt

NODE_BYTES = 320
HOLDING_BYTES = 96
RANK_BYTES = 50_000
_TIERS_OF = tuple(tuple(tier for tier in TIERS if bits >> tier & 1) for bits in range(1 << len(TIERS)))


class ReferenceTree:
    """The state of a `ReferenceIndex`. It has checked all arguments: ranks are known, hashes are u64s."""

    def __init__(self, memory_bytes_max: int) -> None:
        self._nodes = Forest()
        self._ranks: dict[int, RankHolding] = {}
        self._memory_bytes_max = memory_bytes_max
        self._holdings = 0
        self._duplicates = self._unknown_removals = self._refused = 0

    def memory(self) -> dict[str, int]:
        """Return the bytes in use by part; their sum is what the limit bounds."""
        return {
            "nodes": NODE_BYTES * len(self._nodes),
            "holdings": HOLDING_BYTES * self._holdings,
            "ranks": RANK_BYTES * len(self._ranks),
        }

    def _has_memory(self, more_bytes: int) -> bool:
        return not self._memory_bytes_max or sum(self.memory().values()) + more_bytes <= self._memory_bytes_max

    def _admit(self, rank: int) -> None:
        if not self._has_memory(RANK_BYTES):
            raise IndexFull(f"no room for rank {rank} in {self._memory_bytes_max} bytes")
        self._ranks[rank] = RankHolding()

    def _store(self, rank: int, parent: int | None, hashes: Sequence[int], tier: Tier, now_s: float) -> int:
        """Return how many blocks were refused: the first without memory, and all behind it that are not held."""
        refused = 0
        for sequence_hash in hashes:
            if refused:
                refused += not self._ranks[rank].has(sequence_hash, tier)
            else:
                refused += not self._attach(rank, parent, sequence_hash, 1 << tier, now_s)
            parent = sequence_hash
        self._refused += refused
        return refused

    def _attach(self, rank: int, parent: int | None, sequence_hash: int, tier_bits: int, now_s: float) -> bool:
        """Add a block of `rank`; return False without memory for it."""
        if self._memory_bytes_max:
            needed = NODE_BYTES * self._nodes.missing(sequence_hash, parent)
            if not self._has_memory(needed + HOLDING_BYTES * (sequence_hash not in self._ranks[rank].held)):
                return False
        node = self._nodes.link(sequence_hash, parent, now_s)
        for tier in _TIERS_OF[tier_bits]:
            self._hold(rank, sequence_hash, node, tier)
        return True

    def _hold(self, rank: int, sequence_hash: int, node: Node, tier: Tier) -> None:
        was_held = self._ranks[rank].add(sequence_hash, tier)
        if was_held >> tier & 1:
            self._duplicates += 1
            return
        self._holdings += not was_held
        node.holders[tier] |= 1 << rank

    def _remove(self, rank: int, hashes: Sequence[int], tier: Tier) -> None:
        for sequence_hash in hashes:
            self._unknown_removals += not self._release(rank, sequence_hash, tier)

    def _release(self, rank: int, sequence_hash: int, tier: Tier) -> bool:
        is_held = self._ranks[rank].discard(sequence_hash, tier)
        if is_held is None:
            return False
        self._holdings -= not is_held
        self._nodes[sequence_hash].holders[tier] &= ~(1 << rank)
        self._nodes.prune(sequence_hash)
        return True

    def _clear(self, rank: int, tier: Tier) -> None:
        for sequence_hash in self._ranks[rank].on(tier):
            self._release(rank, sequence_hash, tier)

    def _become(self, snapshot: Snapshot) -> None:
        nodes, ranks = rebuilt(snapshot)
        holdings = sum(len(holding.held) for holding in ranks.values())
        needed = NODE_BYTES * len(nodes) + HOLDING_BYTES * holdings + RANK_BYTES * len(ranks)
        if self._memory_bytes_max and needed > self._memory_bytes_max:
            raise IndexFull(f"the snapshot needs {needed} bytes, {self._memory_bytes_max} are allowed")
        nodes.conflicts_total = self._nodes.conflicts_total
        self._nodes, self._ranks, self._holdings = nodes, ranks, holdings
