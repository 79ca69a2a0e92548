"""What the rules of a prefix index say, in sets: slow, and without any of an index's structure.

The blocks form a forest that is known beforehand. A block has a node while a rank holds it, or while a node names it as
its parent; a node names its parent once the block was held. A block is parked while its parent has no node.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from indexer.index.outline import PassedRequest
from indexer.index.prefix_index import Depths, IndexStatistics
from kv_protocol.digest import SetDigest, is_in_buckets
from kv_protocol.events import TIERS, Cleared, Event, Removed, Stored, Tier
from kv_protocol.recovery import HeldBlock

Parked = tuple[int, int, Tier]
"""Rank, block, tier."""


class Waiting(NamedTuple):
    parent: int
    since_s: float


class IndexModel:
    """What the rules say of the blocks of `parent_of`."""

    def __init__(self, parent_of: Mapping[int, int | None], parked_max: int, ttl_s: float) -> None:
        self._parent_of, self._parked_max, self._ttl_s = parent_of, parked_max, ttl_s
        self.ranks: set[int] = set()
        self.held: dict[int, dict[int, int]] = {}  # block -> rank -> bits of tiers
        self.nodes: set[int] = set()
        self._linked: set[int] = set()
        self.parked: dict[Parked, Waiting] = {}  # oldest first
        self._lost: set[tuple[int, Tier]] = set()
        self.forget_counts()

    def forget_counts(self) -> None:
        """Nothing was counted yet."""
        self._duplicates = self._unknown_removals = self._parked_total = self._lost_total = 0

    # ---------------------------------------------------------------------------------------------- facts

    def tell(self, rank: int, event: Event, now_s: float) -> None:
        match event:
            case Stored(hashes, _, _, tier):
                self.store(rank, hashes, tier, now_s)
            case Removed(hashes, tier):
                self.remove(rank, hashes, tier)
            case Cleared(tier):
                self.clear(rank, (tier,))

    def store(self, rank: int, blocks: Iterable[int], tier: Tier, now_s: float) -> None:
        for block in blocks:
            parent = self._parent_of[block]
            if parent is None or parent in self.nodes:
                self._hold(rank, block, tier)
                self._settle()
            else:
                self.parked.pop((rank, block, tier), None)
                self.parked[rank, block, tier] = Waiting(parent, now_s)
                self._parked_total += 1
                if len(self.parked) > self._parked_max:
                    self._lose(next(iter(self.parked)))

    def _hold(self, rank: int, block: int, tier: Tier) -> None:
        holders = self.held.setdefault(block, {})
        self._duplicates += holders.get(rank, 0) >> tier & 1
        holders[rank] = holders.get(rank, 0) | 1 << tier
        self.nodes.add(block)
        self._linked.add(block)
        if (parent := self._parent_of[block]) is not None:
            self.nodes.add(parent)

    def _settle(self) -> None:
        while ready := [block for block, waiting in self.parked.items() if waiting.parent in self.nodes]:
            for rank, block, tier in ready:
                del self.parked[rank, block, tier]
                self._hold(rank, block, tier)

    def _lose(self, block: Parked) -> None:
        del self.parked[block]
        self._lost.add((block[0], block[2]))
        self._lost_total += 1

    def remove(self, rank: int, blocks: Iterable[int], tier: Tier) -> None:
        for block in blocks:
            was_parked = self.parked.pop((rank, block, tier), None) is not None
            bits = self.held.get(block, {}).get(rank, 0)
            if bits >> tier & 1:
                self._unhold(rank, block, 1 << tier)
            elif not was_parked:
                self._unknown_removals += 1
        self._forget_nodes()

    def _unhold(self, rank: int, block: int, bits: int) -> None:
        holders = self.held[block]
        holders[rank] &= ~bits
        if not holders[rank]:
            del holders[rank]
        if not holders:
            del self.held[block]

    def _forget_nodes(self) -> None:
        """Keep the nodes of what is held, and what their links lead to."""
        kept: set[int] = set()
        for held in self.held:
            block: int | None = held
            while block is not None and block not in kept:
                kept.add(block)
                block = self._parent_of[block] if block in self._linked else None
        self.nodes = kept
        self._linked &= kept

    def clear(self, rank: int, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            self.parked = {block: waits for block, waits in self.parked.items() if (block[0], block[2]) != (rank, tier)}
            self._lost.discard((rank, tier))
            for block in [block for block, holders in self.held.items() if holders.get(rank, 0) >> tier & 1]:
                self._unhold(rank, block, 1 << tier)
        self._forget_nodes()

    def drop(self, rank: int) -> None:
        self.clear(rank, TIERS)
        self.ranks.discard(rank)

    def load(self, rank: int, rows: Iterable[HeldBlock]) -> None:
        self.clear(rank, TIERS)
        for row in rows:
            for tier in row.tiers:
                self._hold(rank, row.sequence_hash, tier)
            self._settle()

    def repair(self, rank: int, buckets: bytes, rows: Iterable[HeldBlock]) -> None:
        self.parked = {block: waits for block, waits in self.parked.items() if block[0] != rank}
        self._lost = {each for each in self._lost if each[0] != rank}
        held = [block for block, holders in self.held.items() if rank in holders]
        for block in [block for block in held if is_in_buckets(block, buckets)]:
            self._unhold(rank, block, self.held[block][rank])
        self._forget_nodes()
        for row in rows:
            for tier in row.tiers:
                self._hold(rank, row.sequence_hash, tier)
            self._settle()

    def restored(self, now_s: float) -> None:
        """The state is that of a snapshot: parked blocks wait from now on, and the record of lost blocks is empty."""
        self.parked = {block: Waiting(waiting.parent, now_s) for block, waiting in self.parked.items()}
        self._lost.clear()

    def expire(self, now_s: float) -> set[int]:
        for block in [block for block, waiting in self.parked.items() if waiting.since_s + self._ttl_s <= now_s]:
            self._lose(block)
        losers = {rank for rank, _ in self._lost}
        self._lost.clear()
        return losers

    # ---------------------------------------------------------------------------------------------- answers

    def overlaps(self, query: Sequence[int]) -> dict[int, Depths]:
        first = self.held.get(query[0], {}) if query else {}
        depths = {rank: [self._depth(rank, query, tier) for tier in TIERS] for rank in first}
        return {rank: (each[0], each[1], each[2], each[3]) for rank, each in depths.items()}

    def _depth(self, rank: int, query: Sequence[int], tier: Tier) -> int:
        mask = (2 << tier) - 1
        return next(
            (depth for depth, block in enumerate(query) if not self.held.get(block, {}).get(rank, 0) & mask), len(query)
        )

    def dump(self, rank: int) -> dict[int, HeldBlock]:
        return {
            block: HeldBlock(block, self._parent_of[block], holders[rank])
            for block, holders in self.held.items()
            if rank in holders
        }

    def digest(self, rank: int, tier: Tier) -> SetDigest:
        return SetDigest(block for block, holders in self.held.items() if holders.get(rank, 0) >> tier & 1)

    def children(self, block: int | None) -> list[int]:
        return sorted(each for each in self.nodes if self._known_parent(each) == block)

    def _known_parent(self, block: int) -> int | None:
        return self._parent_of[block] if block in self._linked else None

    def stretches(self) -> dict[int, tuple[int | None, int, int, dict[int, int], int]]:
        """Return the stretches by their last block: parent, blocks, depth, holders, children."""
        behind: dict[int | None, list[int]] = {}
        for block in self.nodes:
            behind.setdefault(self._known_parent(block), []).append(block)
        found: dict[int, tuple[int | None, int, int, dict[int, int], int]] = {}
        for end in self.nodes:
            holders, children = self.held.get(end, {}), behind.get(end, [])
            if len(children) == 1 and self.held.get(children[0], {}) == holders:
                continue
            path = self._path_to(end)
            blocks = next(
                (at for at, block in enumerate(path[1:], 1) if not self._continues(block, holders, behind)), len(path)
            )
            parent = path[blocks] if blocks < len(path) else None
            found[end] = (parent, blocks, len(path), holders, len(children))
        return found

    def outline(self, requests: Sequence[PassedRequest]) -> dict[int, tuple[int, int, int, int, int, float]]:
        """Return the nodes by their last block: first block, blocks, blocks behind with them, depth, children, heat."""
        behind: dict[int | None, list[int]] = {}
        for block in self.nodes:
            behind.setdefault(self._known_parent(block), []).append(block)
        found: dict[int, tuple[int, int, int, int, int, float]] = {}
        for end in (block for block in self.nodes if len(behind.get(block, [])) != 1):
            path = self._path_to(end)
            blocks = next((at for at, block in enumerate(path[1:], 1) if len(behind[block]) != 1), len(path))
            first, last = path[blocks - 1], path[0]
            subtree = sum(first in self._path_to(each) for each in self.nodes)
            heat = sum(
                each.heat
                for each in requests
                if each.sequence_hash in self.nodes and first in self._path_to(each.sequence_hash)
            )
            found[last] = (first, blocks, subtree, len(path), len(behind.get(end, [])), heat)
        return found

    def _continues(self, block: int, holders: dict[int, int], behind: Mapping[int | None, list[int]]) -> bool:
        return len(behind[block]) == 1 and self.held.get(block, {}) == holders

    def _path_to(self, end: int) -> list[int]:
        """Return the block, its parent, and so on, as far back as is known."""
        path, block = [end], self._known_parent(end)
        while block is not None:
            path.append(block)
            block = self._known_parent(block)
        return path

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(
            ranks=len(self.ranks),
            nodes=len(self.nodes),
            held_blocks=sum(len(holders) for holders in self.held.values()),
            parked_blocks=len(self.parked),
            memory_bytes=0,
            duplicate_blocks_total=self._duplicates,
            unknown_removals_total=self._unknown_removals,
            parked_blocks_total=self._parked_total,
            parked_lost_blocks_total=self._lost_total,
            parent_conflicts_total=0,
            refused_blocks_total=0,
        )
