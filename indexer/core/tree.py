"""`PrefixIndex`: the reference prefix index in plain Python, exact; the oracle of the native one.

A sequence hash identifies a block and its whole past, so one node stands for one prefix whoever holds it:

    nodes:  sequence hash -> parent, number of children, per tier a bit set of the ranks that hold it
    held:   per rank, sequence hash -> bit set of tiers

Rules
* *Held* is what a rank was told to hold; *reachable* is held with its whole chain. A match counts reachable blocks
  only, because it walks from the first block and a rank drops out at its first hole; a refilled hole needs no more.
* A node without holders stays while it has children, so that a refill finds them.
* A stored block whose parent has no node is *parked*: bounded, for a time, counted, never made a root. It is not held
  until its parent has one. A dump (`load`) is authority: there an unknown parent becomes a node that nobody holds.
* Stores and removals are idempotent; the removal of an unknown block is a counted no-op.
* Tiers: depth t of a match is the longest prefix whose every block lies on one of the tiers 0..t.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from indexer.core.parked import ParkedBlock, ParkedBlocks
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import HeldBlock, parents_first

Depths = tuple[int, int, int, int]
"""Overlap blocks on the tiers 0..t, for t = gpu, host, disk, external; never decreasing."""


class IndexStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the index holds and has refused so far, in blocks unless named otherwise."""

    ranks: int
    nodes: int
    held_blocks: int
    parked_blocks: int
    duplicate_blocks_total: int
    unknown_removals_total: int
    parked_blocks_total: int
    parked_lost_blocks_total: int
    parent_conflicts_total: int


class _Node:
    __slots__ = ("child_count", "holders", "parent", "parent_known")

    def __init__(self, parent: int | None, *, parent_known: bool = True) -> None:
        self.parent = parent
        self.parent_known = parent_known
        self.child_count = 0
        self.holders = [0, 0, 0, 0]


class _Rank:
    __slots__ = ("digests", "held")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.digests = tuple(SetDigest() for _ in TIERS)


class PrefixIndex:
    """Which rank (a small int, the caller's) holds which prefix. Not thread-safe; no method keeps what it was given."""

    def __init__(self, *, parked_blocks_max: int = 65_536, parked_ttl_s: float = 5.0) -> None:
        self._nodes: dict[int, _Node] = {}
        self._ranks: dict[int, _Rank] = {}
        self._parked = ParkedBlocks(parked_blocks_max, parked_ttl_s)
        self._duplicates = self._unknown_removals = self._conflicts = 0

    def register(self, rank: int) -> None:
        """`rank` is known, and holds nothing unless it was known before."""
        self._ranks.setdefault(rank, _Rank())

    def store(self, rank: int, parent: int | None, sequence_hashes: Sequence[int], tier: Tier, now_s: float) -> None:
        """`rank` holds these blocks on `tier`; each is parked while its parent is unknown."""
        for sequence_hash in sequence_hashes:
            if parent is None or parent in self._nodes:
                self._attach(rank, parent, sequence_hash, tier)
            else:
                self._parked.park(ParkedBlock(rank, sequence_hash, tier), parent, now_s)
            parent = sequence_hash

    def _attach(self, rank: int, parent: int | None, sequence_hash: int, tier: Tier) -> None:
        self._hold(rank, sequence_hash, self._node(sequence_hash, parent), tier)
        if not self._parked:
            return
        came = [sequence_hash] if parent is None else [parent, sequence_hash]  # a dump's unheld parent comes with it
        while came:
            at = came.pop()
            for block in self._parked.take(at):
                self._hold(block.rank, block.sequence_hash, self._node(block.sequence_hash, at), block.tier)
                came.append(block.sequence_hash)

    def _node(self, sequence_hash: int, parent: int | None) -> _Node:
        node = self._nodes.get(sequence_hash)
        if node is None:
            node = self._nodes[sequence_hash] = _Node(parent)
            self._adopt(parent)
        elif not node.parent_known:
            node.parent, node.parent_known = parent, True
            self._adopt(parent)
        elif node.parent != parent:
            self._conflicts += 1
        return node

    def _adopt(self, parent: int | None) -> None:
        if parent is not None:
            if parent not in self._nodes:
                self._nodes[parent] = _Node(None, parent_known=False)
            self._nodes[parent].child_count += 1

    def _hold(self, rank: int, sequence_hash: int, node: _Node, tier: Tier) -> None:
        state = self._ranks[rank]
        bits = state.held.get(sequence_hash, 0)
        if bits >> tier & 1:
            self._duplicates += 1
            return
        state.held[sequence_hash] = bits | 1 << tier
        node.holders[tier] |= 1 << rank
        state.digests[tier].add(sequence_hash)

    def remove(self, rank: int, sequence_hashes: Iterable[int], tier: Tier) -> None:
        """`rank` does not hold these blocks on `tier` any more."""
        for sequence_hash in sequence_hashes:
            parked = self._parked.remove(ParkedBlock(rank, sequence_hash, tier))
            if not self._release(rank, sequence_hash, tier) and not parked:
                self._unknown_removals += 1

    def _release(self, rank: int, sequence_hash: int, tier: Tier) -> bool:
        state = self._ranks[rank]
        bits = state.held.get(sequence_hash, 0)
        if not bits >> tier & 1:
            return False
        if bits == 1 << tier:
            del state.held[sequence_hash]
        else:
            state.held[sequence_hash] = bits & ~(1 << tier)
        state.digests[tier].discard(sequence_hash)
        self._nodes[sequence_hash].holders[tier] &= ~(1 << rank)
        self._prune(sequence_hash)
        return True

    def _prune(self, sequence_hash: int) -> None:
        at: int | None = sequence_hash
        while at is not None:
            node = self._nodes[at]
            if node.child_count or any(node.holders):
                return
            del self._nodes[at]
            at = node.parent
            if at is not None:
                self._nodes[at].child_count -= 1

    def clear(self, rank: int, tier: Tier | None = None) -> None:
        """`rank` holds nothing on `tier` (None: on any), parked or not."""
        state = self._ranks[rank]
        for on_tier in TIERS if tier is None else (tier,):
            self._parked.forget(rank, on_tier)
            for sequence_hash in [held for held, bits in state.held.items() if bits >> on_tier & 1]:
                self._release(rank, sequence_hash, on_tier)

    def drop(self, rank: int) -> None:
        """`rank` is unknown; a no-op if it was."""
        if rank in self._ranks:
            self.clear(rank)
            del self._ranks[rank]

    def load(self, rank: int, blocks: Iterable[HeldBlock]) -> None:
        """`rank` holds exactly `blocks`, which come parents first."""
        self.clear(rank)
        for block in blocks:
            for tier in block.tiers:
                self._attach(rank, block.parent, block.sequence_hash, tier)

    def dump(self, rank: int) -> Iterator[HeldBlock]:
        """Yield what `rank` holds, parents first; the index must not change meanwhile."""
        held = self._ranks[rank].held
        parents = {sequence_hash: self._nodes[sequence_hash].parent for sequence_hash in held}
        for sequence_hash in parents_first(parents):
            yield HeldBlock(sequence_hash, parents[sequence_hash], held[sequence_hash])

    def match(self, sequence_hashes: Sequence[int]) -> dict[int, Depths]:
        """Return the depths of every rank that holds at least the first block on some tier."""
        depths: dict[int, list[int]] = {}
        alive = [-1, -1, -1, -1]
        depth = 0
        for depth, sequence_hash in enumerate(sequence_hashes):
            node = self._nodes.get(sequence_hash)
            holders = 0
            for tier in TIERS:
                if node is not None:
                    holders |= node.holders[tier]
                if alive[tier] & ~holders:
                    if depth:
                        _settle(depths, alive[tier] & ~holders, tier, depth)
                    alive[tier] &= holders
            if not alive[3]:
                break
        else:
            for tier in TIERS if sequence_hashes else ():
                _settle(depths, alive[tier], tier, depth + 1)
        return {rank: (found[0], found[1], found[2], found[3]) for rank, found in depths.items()}

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        """Return the digest of what `rank` holds on `tier`."""
        return self._ranks[rank].digests[tier].of_tier(tier)

    def expire(self, now_s: float) -> set[int]:
        """Let go of stores whose parent did not come in time; return the ranks that lost some, for a resync."""
        return self._parked.expire(now_s)

    def statistics(self) -> IndexStatistics:
        """Return what the index holds and has refused."""
        return IndexStatistics(
            ranks=len(self._ranks),
            nodes=len(self._nodes),
            held_blocks=sum(len(state.held) for state in self._ranks.values()),
            parked_blocks=len(self._parked),
            duplicate_blocks_total=self._duplicates,
            unknown_removals_total=self._unknown_removals,
            parked_blocks_total=self._parked.parked_total,
            parked_lost_blocks_total=self._parked.lost_total,
            parent_conflicts_total=self._conflicts,
        )


def _settle(depths: dict[int, list[int]], ranks: int, tier: Tier, depth: int) -> None:
    while ranks:
        lowest = ranks & -ranks
        depths.setdefault(lowest.bit_length() - 1, [0, 0, 0, 0])[tier] = depth
        ranks ^= lowest
