"""The state of the reference index: nodes, what each rank holds, and parked blocks.

Nodes: sequence hash to parent, number of children, and holders.

A node exists while its block has holders, or while it has children. Its parent is a node, or there is none (the first
block of a sequence), or it is unknown: a dump named the block as a parent, and no store of it came yet.

    stored parent    the node's parent is      afterwards
    p                (there is no node)        p, created if it has no node
    p                unknown                   p, unless p is the block itself or behind it: a conflict
    p                p                         p
    p                another, or none          as before: a conflict

Holders: the blocks of one rank, sequence hash to bits of tiers, and a digest of each tier.

Parked blocks: stored blocks with an unknown parent wait for it, for a time and within bounds.

    parked -> taken      when a node with the parent's hash appears
           -> removed    when the rank removes the block
           -> forgotten  with all blocks of its rank on the tier
           -> lost       oldest first beyond `blocks_max`, or after `ttl_s`: its rank needs a resync, unless its
                         blocks on the tier were forgotten meanwhile

Each block waits for its own parent, so a parked chain attaches link by link.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

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


class ParkedBlock(NamedTuple):
    """A stored block of a rank that has no node yet."""

    rank: int
    sequence_hash: int
    tier: Tier


class ParkedBlocks:
    """The blocks that wait for a parent. Their age counts from the `now_s` of `park`."""

    def __init__(self, blocks_max: int, ttl_s: float) -> None:
        self._blocks_max = blocks_max
        self._ttl_s = ttl_s
        self._parked: dict[ParkedBlock, tuple[int, float]] = {}  # oldest first
        self._waiting: dict[int, set[ParkedBlock]] = {}
        self._losers: set[tuple[int, Tier]] = set()
        self.parked_total = self.lost_total = 0

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, block: object) -> bool:
        return block in self._parked

    def waiting(self) -> Iterator[tuple[ParkedBlock, int]]:
        """Yield the parked blocks, oldest first, with the parents that they wait for."""
        return ((block, parent) for block, (parent, _) in self._parked.items())

    def parents(self) -> set[int]:
        """Return the awaited parents."""
        return set(self._waiting)

    def replace(self, blocks: Iterable[tuple[ParkedBlock, int]], now_s: float) -> None:
        """Replace all parked blocks by `blocks`, oldest first, parked now; those beyond the bound count as lost."""
        self._parked.clear()
        self._waiting.clear()
        self._losers.clear()
        for block, parent in blocks:
            self._wait(block, parent, now_s)

    def park(self, block: ParkedBlock, parent: int, now_s: float) -> None:
        """Park `block` until `parent` comes; beyond the bound the oldest block is lost."""
        self.remove(block)
        self.parked_total += 1
        self._wait(block, parent, now_s)

    def _wait(self, block: ParkedBlock, parent: int, now_s: float) -> None:
        self._parked[block] = (parent, now_s)
        self._waiting.setdefault(parent, set()).add(block)
        if len(self._parked) > self._blocks_max:
            self._lose(next(iter(self._parked)))

    def take(self, parent: int) -> list[ParkedBlock]:
        """Remove and return the blocks that waited for `parent`, sorted."""
        blocks = sorted(self._waiting.pop(parent, ()))
        for block in blocks:
            del self._parked[block]
        return blocks

    def remove(self, block: ParkedBlock) -> bool:
        """Remove `block`; return whether it was parked."""
        if block not in self._parked:
            return False
        parent, _ = self._parked.pop(block)
        waiting = self._waiting[parent]
        waiting.discard(block)
        if not waiting:
            del self._waiting[parent]
        return True

    def forget(self, rank: int, tier: Tier) -> None:
        """Drop the parked blocks of `rank` on `tier`, and forget that some were lost."""
        self._losers.discard((rank, tier))
        for block in [block for block in self._parked if (block.rank, block.tier) == (rank, tier)]:
            self.remove(block)

    def expire(self, now_s: float) -> set[int]:
        """Drop blocks that waited longer than `ttl_s`; return the ranks that lost blocks since the last call."""
        while self._parked and next(iter(self._parked.values()))[1] + self._ttl_s <= now_s:
            self._lose(next(iter(self._parked)))
        losers = {rank for rank, _ in self._losers}
        self._losers.clear()
        return losers

    def _lose(self, block: ParkedBlock) -> None:
        self.remove(block)
        self.lost_total += 1
        self._losers.add((block.rank, block.tier))


def children_of(forest: Forest, sequence_hash: int | None) -> list[int]:
    """Return the blocks whose parent is `sequence_hash` (None: those without a known one), ascending."""
    return sorted(block for block, node in forest.items() if node.parent == sequence_hash)


def walk(forest: Forest) -> Iterator[list[int]]:
    """Yield every node once, in chains of equal holders without a fork, each after the one that its parent is in."""
    behind: dict[int | None, list[int]] = {}
    for block, node in forest.items():
        behind.setdefault(node.parent, []).append(block)
    pending = list(behind.get(None, ()))
    while pending:
        first = pending.pop()
        hashes, after = [first], behind.get(first, [])
        while len(after) == 1 and forest[after[0]].holders == forest[first].holders:
            hashes.append(after[0])
            after = behind.get(hashes[-1], [])
        yield hashes
        pending += after
