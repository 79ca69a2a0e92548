"""The nodes of the reference index: sequence hash to parent, number of children, and holders.

A node exists while its block has holders, or while it has children. Its parent is a node, or there is none (the first
block of a sequence), or it is unknown: the block was named as a parent, and no store of it came yet.

    stored parent    the node's parent is      afterwards
    p                (there is no node)        p, created if it has no node
    p                unknown                   p, unless p is the block itself or behind it: a conflict
    p                p                         p
    p                another, or none          as before: a conflict
"""

from collections.abc import Iterator, Mapping

from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Tier


class Node:
    """One prefix. `holders` has, for each tier, bit r set where rank r holds the block on it."""

    __slots__ = ("child_count", "holders", "last_stored_s", "parent", "parent_known")

    def __init__(self, parent: int | None, last_stored_s: float, *, parent_known: bool = True) -> None:
        self.parent = parent
        self.parent_known = parent_known
        self.child_count = 0
        self.holders = [0, 0, 0, 0]
        self.last_stored_s = last_stored_s

    def holder_bits(self) -> dict[int, int]:
        """Return the holders of the block: rank -> bits of tiers, by rank ascending."""
        all_ranks = self.holders[0] | self.holders[1] | self.holders[2] | self.holders[3]
        return {rank: sum((self.holders[tier] >> rank & 1) << tier for tier in TIERS) for rank in ranks_of(all_ranks)}


class Forest(dict[int, Node]):
    """Every node by its sequence hash."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts_total = 0

    def missing(self, sequence_hash: int, parent: int | None) -> int:
        """Return how many nodes `link` would create."""
        if sequence_hash in self and self[sequence_hash].parent_known:
            return 0
        return (sequence_hash not in self) + (parent not in (None, sequence_hash) and parent not in self)

    def link(self, sequence_hash: int, parent: int | None, now_s: float) -> Node:
        """Return the block's node, created or updated by the table above."""
        node = self.get(sequence_hash)
        if node is None:
            return self._made(sequence_hash, parent, now_s)
        node.last_stored_s = max(node.last_stored_s, now_s)
        if node.parent_known:
            self.conflicts_total += node.parent != parent
        elif self._leads_to(parent, sequence_hash):
            self.conflicts_total += 1
        else:
            node.parent, node.parent_known = parent, True
            self._adopt(parent, now_s)
        return node

    def _made(self, sequence_hash: int, parent: int | None, now_s: float) -> Node:
        """Return a new node. It has no children yet, but may name itself as its parent."""
        if parent == sequence_hash:
            self.conflicts_total += 1
            made = self[sequence_hash] = Node(None, now_s, parent_known=False)
        else:
            made = self[sequence_hash] = Node(parent, now_s)
            self._adopt(parent, now_s)
        return made

    def _leads_to(self, at: int | None, sequence_hash: int) -> bool:
        """Return whether the block is `at` or before it."""
        while at is not None and at != sequence_hash:
            at = self[at].parent if at in self else None
        return at is not None

    def _adopt(self, parent: int | None, now_s: float) -> None:
        if parent is not None:
            if parent not in self:
                self[parent] = Node(None, now_s, parent_known=False)
            self[parent].child_count += 1

    def prune(self, sequence_hash: int) -> None:
        """Remove the node, and those before it, while they have no holders and no children."""
        at: int | None = sequence_hash
        while at is not None:
            node = self[at]
            if node.child_count or any(node.holders):
                return
            del self[at]
            at = node.parent
            if at is not None:
                self[at].child_count -= 1


def ranks_of(bits: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    ranks = []
    while bits:
        lowest = bits & -bits
        ranks.append(lowest.bit_length() - 1)
        bits ^= lowest
    return ranks


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


def parents_first(parents: Mapping[int, int | None]) -> Iterator[int]:
    """Yield every key of `parents` (block -> its parent), each after its parent if that is a key too. O(n)."""
    seen: set[int] = set()
    for block in parents:
        chain: list[int] = []
        at: int | None = block
        while at is not None and at in parents and at not in seen:
            seen.add(at)
            chain.append(at)
            at = parents[at]
        yield from reversed(chain)
