"""Parked blocks: stored blocks with an unknown parent wait for it, for a time and within bounds.

    parked -> taken      when a node with the parent's hash appears
           -> removed    when the rank removes the block
           -> forgotten  with all blocks of its rank on the tier
           -> lost       oldest first beyond `blocks_max`, or after `ttl_s`: its rank needs a resync, unless its
                         blocks on the tier were forgotten meanwhile

Each block waits for its own parent, so a parked chain attaches link by link.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kv_protocol.events import Tier


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
