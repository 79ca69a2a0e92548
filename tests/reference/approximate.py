"""The approximate index: blocks that worker ranks probably hold, derived only from the requests routed to them.

    routed            the request's blocks become the rank's newest; they count for `ttl_s`
    over capacity     the rank's oldest blocks are dropped, of one request the deepest first
    `ttl_s` passed    blocks that were not routed again expire
    worker forgotten  all its blocks are dropped

Ranks whose events are trusted have blocks here, too: their trust may end at any moment, and what was routed to them
before then counts.

A rank with a block has its parents, so a parent is never older than its child, and the oldest block is a leaf. No two
leaves are of one request.

A checkpoint has a rank's blocks as stretches. A stretch is consecutive blocks, without a fork, whose last request is
the same. A new block begins a stretch if it is a first one, or forks off. A held block begins one from the time on
when a request ended right before it, or forked off there; that stays so when the other blocks are gone.
"""

from dataclasses import dataclass
from typing import Any

from kv_protocol.ids import WorkerRank
from tests.reference.chains import BLOCK_BYTES, depth, prefixes


@dataclass
class Block:
    """When the block expires, the number of the last request that had it, and whether a stretch begins with it."""

    expires_at_s: float
    request: int
    begins_stretch: bool


class RoutedBlocks:
    """The blocks of one rank, by their names."""

    def __init__(self) -> None:
        self.held: dict[bytes, Block] = {}

    def children(self, block: bytes) -> list[bytes]:
        """Return the blocks right behind a block, or the first ones of all (`b""`), in the order in which they came."""
        return [each for each in self.held if each[:-BLOCK_BYTES] == block]

    def expire(self, now_s: float) -> int:
        """Drop what expires at `now_s` or before; return how many blocks."""
        left = {name: block for name, block in self.held.items() if block.expires_at_s > now_s}
        dropped, self.held = len(self.held) - len(left), left
        return dropped

    def add(self, chain: bytes, expires_at_s: float, request: int, capacity: int) -> int:
        """Add the blocks of `chain` as the newest; drop the oldest until `capacity` are left, and return how many."""
        known = chain[: depth(chain, self.held) * BLOCK_BYTES]
        behind = self.children(known)
        for name in behind:
            self.held[name].begins_stretch = True
        begins = not known or bool(behind)
        for name in prefixes(chain):
            block = self.held.get(name)
            if block is None:
                block, begins = self.held.setdefault(name, Block(0.0, 0, begins)), False
            block.expires_at_s, block.request = expires_at_s, request
        dropped = 0
        while len(self.held) > capacity:
            leaves = [name for name in self.held if not self.children(name)]
            del self.held[min(leaves, key=lambda name: self.held[name].request)]
            dropped += 1
        return dropped

    def overlap(self, chain: bytes, now_s: float) -> int:
        """Return how many leading blocks of `chain` are held and not expired."""
        return depth(chain, {name for name, block in self.held.items() if block.expires_at_s > now_s})

    def rows(self) -> list[tuple[int, bytes, float]]:
        """Return all stretches, those of newer requests first, and of one request the first blocks first.

        A stretch: the place of its parent among the rows (-1: none), its blocks, when they expire.
        """
        rows: list[tuple[int, bytes, float]] = []
        places = {b"": -1}
        for name in sorted(self.held, key=lambda name: (-self.held[name].request, len(name))):
            above = name[:-BLOCK_BYTES]
            if self.held[name].begins_stretch:
                places[name] = len(rows)
                rows.append((places[above], name[-BLOCK_BYTES:], self.held[name].expires_at_s))
            else:
                place = places[name] = places[above]
                rows[place] = (rows[place][0], rows[place][1] + name[-BLOCK_BYTES:], self.held[name].expires_at_s)
        return rows


class ApproximateIndex:
    """The blocks of all ranks. `now_s` never goes back."""

    def __init__(self, ttl_s: float, blocks_max: int) -> None:
        self.ttl_s, self.blocks_max = ttl_s, blocks_max
        self.ranks: dict[WorkerRank, RoutedBlocks] = {}
        self.requests = self.expired = self.evicted = self.left = 0

    def routed(self, rank: WorkerRank, chain: bytes, now_s: float, capacity: int) -> None:
        """A request with these blocks was routed to `rank`, whose capacity is so many blocks (0: not stated)."""
        if not chain:
            return
        at = self.ranks.setdefault(rank, RoutedBlocks())
        self.requests += 1
        self.expired += at.expire(now_s)
        capacity = min(capacity or self.blocks_max, self.blocks_max)
        self.evicted += at.add(chain, now_s + self.ttl_s, self.requests, capacity)

    def overlap(self, chain: bytes, rank: WorkerRank, now_s: float) -> int:
        """Return how many leading blocks the rank probably holds."""
        return self.ranks[rank].overlap(chain, now_s) if rank in self.ranks else 0

    def forget(self, worker_id: str, now_s: float) -> None:
        for rank in [rank for rank in self.ranks if rank.worker_id == worker_id]:
            at = self.ranks.pop(rank)
            self.expired += at.expire(now_s)
            self.left += len(at.held)

    def tick(self, now_s: float) -> None:
        """Drop expired blocks, and ranks without any."""
        self.expired += sum(at.expire(now_s) for at in self.ranks.values())
        self.ranks = {rank: at for rank, at in self.ranks.items() if at.held}

    def tables(self) -> dict[str, list[Any]]:
        return {
            "totals": [self.expired, self.evicted, self.left],
            "stretches": [(rank, *row) for rank, at in self.ranks.items() for row in at.rows()],
        }
