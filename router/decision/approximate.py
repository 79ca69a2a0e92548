"""The approximate index: blocks that worker ranks probably hold, derived only from the requests routed to them.

    routed            the request's blocks become the rank's newest; they count for `ttl_s`
    over capacity     the rank's oldest blocks are dropped, of one request the deepest first
    `ttl_s` passed    blocks that were not routed again expire
    worker forgotten  all its blocks are dropped

A rank's blocks are a tree of stretches: consecutive blocks, without a fork, whose last request is the same. A rank with
a block has its parents, so a parent is never older than its child; the oldest stretch is a leaf, and only leaves are
ordered by expiry. The cost of a request grows with the forks on its path, hardly with its blocks.
"""

import itertools
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kv_protocol.ids import WorkerRank
from router.journal.checkpoint_rows import ApproximateTotals, StretchRow
from router.prompt.chains import BLOCK_BYTES, block_count, shared_blocks


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


class _Age(NamedTuple):
    """When blocks expire, and the number of the last request that had them."""

    expires_at_s: float
    request: int


_GONE = _Age(float("-inf"), 0)
"""Of a dropped stretch."""
_LEAVES_FIRST = 64


class _Stretch:
    """Consecutive blocks, packed. `children` are keyed by their first block; the root is empty and its own parent."""

    __slots__ = ("age", "blocks", "children", "parent")

    def __init__(self, blocks: bytes, parent: "_Stretch | None", age: _Age) -> None:
        self.blocks = blocks
        self.parent = parent or self
        self.children: dict[bytes, _Stretch] = {}
        self.age = age


class _Frozen:
    """The rows of a tree at the time of a checkpoint, made before the tree next changes, or when they are read."""

    __slots__ = ("_rank", "_rows", "_tree")

    def __init__(self, rank: WorkerRank, tree: "_Tree") -> None:
        self._rank = rank
        self._tree: _Tree | None = tree
        self._rows = list[StretchRow]()

    def rows(self) -> list[StretchRow]:
        """Return the rows; the tree may change from now on."""
        tree = self._tree
        if tree is not None:
            self._rows = tree.rows(self._rank)
            self._tree = None
            if tree.frozen is self:
                tree.frozen = None
        return self._rows


class _Tree:
    """One rank's blocks. `frozen`: a checkpoint needs the present state."""

    __slots__ = ("_leaves", "_leaves_max", "_listed", "block_count", "frozen", "root")

    def __init__(self) -> None:
        self.frozen: _Frozen | None = None
        self.root = _Stretch(b"", None, _Age(float("inf"), 0))
        self._leaves = list[tuple[_Age, int, _Stretch]]()  # a heap; entries of other ages and of parents are outdated
        self._leaves_max = _LEAVES_FIRST
        self._listed = 0
        self.block_count = 0

    def list_leaf(self, leaf: _Stretch) -> None:
        """Enter a leaf, or one whose age changed."""
        self._listed += 1
        heappush(self._leaves, (leaf.age, self._listed, leaf))
        if len(self._leaves) > self._leaves_max:
            self._leaves = [each for each in self._leaves if each[0] == each[2].age and not each[2].children]
            heapify(self._leaves)
            self._leaves_max = 2 * len(self._leaves) + _LEAVES_FIRST

    def oldest(self) -> _Stretch | None:
        """Return the oldest leaf; None if the tree is empty."""
        while self._leaves:
            age, _, leaf = self._leaves[0]
            if age == leaf.age and not leaf.children:
                return leaf
            heappop(self._leaves)
        return None

    def add(self, chain: bytes, age: _Age) -> None:
        """Add the blocks of `chain`, as the newest."""
        if self.frozen is not None:
            self.frozen.rows()
        node, at = self.root, 0
        while (child := node.children.get(chain[at : at + BLOCK_BYTES])) is not None:
            if not chain.startswith(child.blocks, at):
                self._split(child, shared_blocks(child.blocks, chain, at // BLOCK_BYTES) * BLOCK_BYTES)
            child.age = age
            node, at = child, at + len(child.blocks)
        if at < len(chain):
            node = self._extended(node, chain[at:], age)
        if node is not self.root and not node.children:
            self.list_leaf(node)

    def _split(self, stretch: _Stretch, cut: int) -> None:
        """Move the blocks behind the first `cut` bytes into a stretch of their own."""
        behind = _Stretch(stretch.blocks[cut:], stretch, stretch.age)
        behind.children = stretch.children
        for child in behind.children.values():
            child.parent = behind
        if not behind.children:
            self.list_leaf(behind)
        stretch.blocks, stretch.children = stretch.blocks[:cut], {behind.blocks[:BLOCK_BYTES]: behind}

    def _extended(self, node: _Stretch, blocks: bytes, age: _Age) -> _Stretch:
        self.block_count += block_count(blocks)
        if node is not self.root and not node.children:
            node.blocks += blocks
            return node
        leaf = node.children[blocks[:BLOCK_BYTES]] = _Stretch(blocks, node, age)
        return leaf

    def rows(self, rank: WorkerRank) -> list[StretchRow]:
        """Return the rows for a checkpoint."""
        rows = list[StretchRow]()
        unseen = [(-1, child) for child in reversed(self.root.children.values())]
        while unseen:
            parent, node = unseen.pop()
            at = len(rows)
            rows.append(StretchRow(rank, parent, node.blocks, node.age.expires_at_s, node.age.request))
            unseen.extend((at, child) for child in reversed(node.children.values()))
        return rows

    def drop(self, blocks_max: int) -> int:
        """Drop the oldest leaf, or the deepest `blocks_max` of its blocks; return how many."""
        if self.frozen is not None:
            self.frozen.rows()
        leaf = self.oldest()
        assert leaf is not None
        held = block_count(leaf.blocks)
        dropped = min(blocks_max, held)
        self.block_count -= dropped
        if dropped < held:
            leaf.blocks = leaf.blocks[: (held - dropped) * BLOCK_BYTES]
            return dropped
        leaf.age = _GONE
        parent = leaf.parent
        del parent.children[leaf.blocks[:BLOCK_BYTES]]
        if parent is not self.root and not parent.children:
            self.list_leaf(parent)
        return dropped

    def overlap(self, chain: bytes, now_s: float) -> int:
        """Return how many leading blocks of `chain` are held and not expired."""
        node, at = self.root, 0
        while (child := node.children.get(chain[at : at + BLOCK_BYTES])) is not None:
            if child.age.expires_at_s <= now_s:
                break
            if not chain.startswith(child.blocks, at):
                return at // BLOCK_BYTES + shared_blocks(child.blocks, chain, at // BLOCK_BYTES)
            node, at = child, at + len(child.blocks)
        return at // BLOCK_BYTES


class ApproximateIndex:
    """All ranks' trees. `now_s` never goes back."""

    def __init__(self, limits: ApproximateLimits | None = None) -> None:
        self._limits = limits or ApproximateLimits()
        self._trees: dict[WorkerRank, _Tree] = {}
        self._requests = 0
        self._expired_blocks = self._evicted_blocks = self._left_blocks = 0
        self._restored = list[_Stretch]()
        """The restored stretches of the current rank, in the order of their rows."""

    def routed(self, rank: WorkerRank, chain: bytes, now_s: float, capacity_blocks: int = 0) -> None:
        """A request with these blocks was routed to `rank`, whose capacity is `capacity_blocks` (0: not stated)."""
        if not chain:
            return
        tree = self._trees.get(rank)
        if tree is None:
            tree = self._trees[rank] = _Tree()
        self._requests += 1
        self._expire(tree, now_s)
        tree.add(chain, _Age(now_s + self._limits.ttl_s, self._requests))
        capacity = min(capacity_blocks or self._limits.blocks_max, self._limits.blocks_max)
        while tree.block_count > capacity:
            self._evicted_blocks += tree.drop(tree.block_count - capacity)

    def overlap(self, chain: bytes, ranks: Sequence[WorkerRank], now_s: float) -> list[int]:
        """Return how many leading blocks each rank probably holds, in the order of `ranks`."""
        trees = [self._trees.get(rank) for rank in ranks]
        return [0 if tree is None else tree.overlap(chain, now_s) for tree in trees]

    def forget(self, worker_id: str, now_s: float) -> None:
        """Drop all blocks of a worker that left or restarted."""
        for rank in [rank for rank in self._trees if rank.worker_id == worker_id]:
            tree = self._trees.pop(rank)
            self._expire(tree, now_s)
            self._left_blocks += tree.block_count

    def tick(self, now_s: float) -> None:
        """Drop expired blocks; answers do not change by that."""
        for rank, tree in list(self._trees.items()):
            self._expire(tree, now_s)
            if not tree.block_count:
                del self._trees[rank]

    def _expire(self, tree: _Tree, now_s: float) -> None:
        while (leaf := tree.oldest()) is not None and leaf.age.expires_at_s <= now_s:
            self._expired_blocks += tree.drop(tree.block_count)

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
        for rank, tree in self._trees.items():
            if tree.frozen is not None:
                tree.frozen.rows()
            tree.frozen = _Frozen(rank, tree)
            frozen.append(tree.frozen)
        return itertools.chain.from_iterable(map(_Frozen.rows, frozen))

    def restore(self, row: StretchRow) -> None:
        """Restore a stretch; its parent was restored before."""
        tree = self._trees.get(row.rank)
        if tree is None:
            tree = self._trees[row.rank] = _Tree()
            self._restored.clear()
        parent = tree.root if row.parent < 0 else self._restored[row.parent]
        node = _Stretch(row.blocks, parent, _Age(row.expires_at_s, row.request))
        parent.children[row.blocks[:BLOCK_BYTES]] = node
        tree.list_leaf(node)
        tree.block_count += block_count(row.blocks)
        self._restored.append(node)

    def statistics(self) -> ApproximateStatistics:
        """Return the figures; blocks that expired since the last tick still count."""
        return ApproximateStatistics(
            blocks={rank: tree.block_count for rank, tree in self._trees.items()},
            expired_blocks_total=self._expired_blocks,
            evicted_blocks_total=self._evicted_blocks,
            left_blocks_total=self._left_blocks,
        )
