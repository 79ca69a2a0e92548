"""The approximate index: blocks that worker ranks probably hold, derived only from the requests routed to them.

    routed            the request's blocks become the rank's newest; they count for `ttl_s`
    over capacity     the rank's oldest blocks are dropped, of one request the deepest first
    `ttl_s` passed    blocks that were not routed again expire
    worker forgotten  all its blocks are dropped

Each rank's blocks are a tree (`routed_tree.py`). Ranks whose events are trusted have one, too: their trust may end at
any moment, and what was routed to them before then counts.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kv_protocol.ids import WorkerRank
from router.decision.routed_tree import RoutedTree, new_routed_tree
from router.journal.checkpoint_rows import ApproximateTotals, StretchRow


class ApproximateLimits(NamedTuple):
    """How long a routed block counts (seconds), and how many blocks of one rank count at most."""

    ttl_s: float = 120.0
    blocks_max: int = 1 << 18


class ApproximateStatistics(NamedTuple):
    """Current blocks of each rank; total blocks that expired, were evicted, or left with their worker."""

    blocks: dict[WorkerRank, int]
    expired_blocks_total: int
    evicted_blocks_total: int
    left_blocks_total: int


class _Frozen:
    """The rows of a tree at the time of a checkpoint, made before the tree next changes, or when they are read."""

    __slots__ = ("_of", "_rank", "_rows")

    def __init__(self, rank: WorkerRank, of: "_Routed") -> None:
        self._rank = rank
        self._of: _Routed | None = of
        self._rows = list[StretchRow]()

    def rows(self) -> list[StretchRow]:
        """Return the rows; the tree may change from now on."""
        of = self._of
        if of is not None:
            self._rows = [StretchRow(self._rank, *row) for row in of.tree.rows()]
            self._of = None
            if of.frozen is self:
                of.frozen = None
        return self._rows


class _Routed:
    """One rank's blocks. `frozen`: a checkpoint needs the present state."""

    __slots__ = ("frozen", "tree")

    def __init__(self) -> None:
        self.frozen: _Frozen | None = None
        self.tree: RoutedTree = new_routed_tree()

    def thaw(self) -> None:
        """Make the rows of a checkpoint before the tree changes."""
        if self.frozen is not None:
            self.frozen.rows()

    def expire(self, now_s: float) -> int:
        """Drop what is over; return how many blocks."""
        if self.tree.next_expiry_s() > now_s:
            return 0
        self.thaw()
        return self.tree.expire(now_s)


class ApproximateIndex:
    """All ranks' trees. `now_s` never goes back."""

    def __init__(self, limits: ApproximateLimits | None = None) -> None:
        self._limits = limits or ApproximateLimits()
        self._routed: dict[WorkerRank, _Routed] = {}
        self._requests = 0
        self._expired_blocks = self._evicted_blocks = self._left_blocks = 0

    def routed(self, rank: WorkerRank, chain: bytes, now_s: float, capacity_blocks: int = 0) -> None:
        """A request with these blocks was routed to `rank`, whose capacity is `capacity_blocks` (0: not stated)."""
        if not chain:
            return
        routed = self._routed.get(rank)
        if routed is None:
            routed = self._routed[rank] = _Routed()
        self._requests += 1
        self._expired_blocks += routed.expire(now_s)
        routed.thaw()
        limits = self._limits
        capacity = min(capacity_blocks or limits.blocks_max, limits.blocks_max)
        self._evicted_blocks += routed.tree.add(chain, now_s + limits.ttl_s, self._requests, capacity)

    def overlap(self, chain: bytes, ranks: Sequence[WorkerRank], now_s: float) -> list[int]:
        """Return how many leading blocks each rank probably holds, in the order of `ranks`."""
        found = [self._routed.get(rank) for rank in ranks]
        return [0 if each is None else each.tree.overlap(chain, now_s) for each in found]

    def forget(self, worker_id: str, now_s: float) -> None:
        """Drop all blocks of a worker that left or restarted."""
        for rank in [rank for rank in self._routed if rank.worker_id == worker_id]:
            routed = self._routed.pop(rank)
            self._expired_blocks += routed.expire(now_s)
            self._left_blocks += routed.tree.block_count()

    def tick(self, now_s: float) -> None:
        """Drop expired blocks; answers do not change by that."""
        for rank, routed in list(self._routed.items()):
            self._expired_blocks += routed.expire(now_s)
            if not routed.tree.block_count():
                del self._routed[rank]

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> ApproximateTotals:
        """Return the row for a checkpoint."""
        return ApproximateTotals(self._requests, self._expired_blocks, self._evicted_blocks, self._left_blocks)

    def restore_totals(self, row: ApproximateTotals) -> None:
        """Restore the totals from the row."""
        self._requests, self._expired_blocks, self._evicted_blocks, self._left_blocks = row

    def rows(self) -> Iterable[StretchRow]:
        """Return the rows for a checkpoint; a rank's rows are made before its tree changes, or when they are read."""
        frozen = list[_Frozen]()
        for rank, routed in self._routed.items():
            routed.thaw()
            routed.frozen = _Frozen(rank, routed)
            frozen.append(routed.frozen)
        return itertools.chain.from_iterable(map(_Frozen.rows, frozen))

    def restore(self, row: StretchRow) -> None:
        """Restore a stretch; its parent was restored before."""
        routed = self._routed.get(row.rank)
        if routed is None:
            routed = self._routed[row.rank] = _Routed()
        routed.tree.restore(row.parent, row.blocks, row.expires_at_s, row.request)

    def statistics(self) -> ApproximateStatistics:
        """Return the figures; blocks that expired since the last tick still count."""
        return ApproximateStatistics(
            blocks={rank: routed.tree.block_count() for rank, routed in self._routed.items()},
            expired_blocks_total=self._expired_blocks,
            evicted_blocks_total=self._evicted_blocks,
            left_blocks_total=self._left_blocks,
        )
