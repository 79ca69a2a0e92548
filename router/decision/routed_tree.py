"""The blocks that were routed to one rank, as a tree.

A node is a stretch: consecutive blocks, without a fork, whose last request is the same. A rank with a block has its
parents, so a parent is never older than its child; the oldest stretch is a leaf, and only leaves are ordered by expiry.
The cost of a request grows with the forks on its path, hardly with its blocks.

`new_routed_tree` returns the tree in C++ (`router/native/`) where it was built; `PythonRoutedTree` otherwise. The
latter is the reference: the same calls have the same answers, and the same rows in the same order.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol

from router import native
from router.prompt.chains import BLOCK_BYTES, block_count, shared_blocks, whole

_LEAVES_FIRST = 64
StretchAt = tuple[int, bytes, float, int]
"""A stretch: the place of its parent among the rows (-1: none), its blocks, when they expire, its last request."""


class RoutedTree(Protocol):
    """The blocks of one rank. `ValueError`: bytes are no whole number of blocks, or there is no such parent."""

    def block_count(self) -> int:
        """Return how many blocks there are."""

    def next_expiry_s(self) -> float:
        """Return when the next blocks expire; infinity if there are none."""

    def expire(self, now_s: float) -> int:
        """Drop what expires at `now_s` or before; return how many blocks."""

    def add(self, chain: bytes, expires_at_s: float, request: int, capacity: int) -> int:
        """Add the blocks of `chain` as the newest; drop the oldest until `capacity` are left, and return how many.

        Of blocks of one request the deepest are dropped first. `request` is greater at each call, and `expires_at_s`
        never smaller.
        """

    def overlap(self, chain: bytes, now_s: float) -> int:
        """Return how many leading blocks of `chain` are held and not expired."""

    def rows(self) -> Sequence[StretchAt]:
        """Return all stretches, parents before their children, children in the order in which they came."""

    def restore(self, parent: int, blocks: bytes, expires_at_s: float, request: int) -> None:
        """Add the next row of a tree to an empty one."""


class _Age(NamedTuple):
    """When blocks expire, and the number of the last request that had them."""

    expires_at_s: float
    request: int


_GONE = _Age(-math.inf, 0)
"""Of a dropped stretch."""


class _Stretch:
    """Consecutive blocks, packed. `children` are keyed by their first block; the root is empty and its own parent."""

    __slots__ = ("age", "blocks", "children", "parent")

    def __init__(self, blocks: bytes, parent: "_Stretch | None", age: _Age) -> None:
        self.blocks = blocks
        self.parent = parent or self
        self.children: dict[bytes, _Stretch] = {}
        self.age = age


class PythonRoutedTree:
    """A `RoutedTree` in Python."""

    def __init__(self) -> None:
        self._root = _Stretch(b"", None, _Age(math.inf, 0))
        self._leaves = list[tuple[_Age, int, _Stretch]]()  # a heap; entries of other ages and of parents are outdated
        self._leaves_max = _LEAVES_FIRST
        self._listed = 0
        self._block_count = 0
        self._restored = list[_Stretch]()

    def block_count(self) -> int:
        """Return how many blocks there are."""
        return self._block_count

    def next_expiry_s(self) -> float:
        """Return when the next blocks expire."""
        leaf = self._oldest()
        return math.inf if leaf is None else leaf.age.expires_at_s

    def expire(self, now_s: float) -> int:
        """Drop what is over."""
        dropped = 0
        while self.next_expiry_s() <= now_s:
            dropped += self._drop(self._block_count)
        return dropped

    def add(self, chain: bytes, expires_at_s: float, request: int, capacity: int) -> int:
        """Add the blocks of `chain`."""
        node, at, age = self._root, 0, _Age(expires_at_s, request)
        whole("chain", chain)
        self._restored.clear()
        while (child := node.children.get(chain[at : at + BLOCK_BYTES])) is not None:
            if not chain.startswith(child.blocks, at):
                self._split(child, shared_blocks(child.blocks, chain, at // BLOCK_BYTES) * BLOCK_BYTES)
            child.age = age
            node, at = child, at + len(child.blocks)
        if at < len(chain):
            node = self._extended(node, chain[at:], age)
        if node is not self._root and not node.children:
            self._list_leaf(node)
        dropped = 0
        while self._block_count > capacity:
            dropped += self._drop(self._block_count - capacity)
        return dropped

    def overlap(self, chain: bytes, now_s: float) -> int:
        """Return the leading blocks."""
        node, at = self._root, 0
        whole("chain", chain)
        while (child := node.children.get(chain[at : at + BLOCK_BYTES])) is not None:
            if child.age.expires_at_s <= now_s:
                break
            if not chain.startswith(child.blocks, at):
                return at // BLOCK_BYTES + shared_blocks(child.blocks, chain, at // BLOCK_BYTES)
            node, at = child, at + len(child.blocks)
        return at // BLOCK_BYTES

    def rows(self) -> list[StretchAt]:
        """Return all stretches."""
        rows = list[StretchAt]()
        unseen = [(-1, child) for child in reversed(self._root.children.values())]
        while unseen:
            parent, node = unseen.pop()
            at = len(rows)
            rows.append((parent, node.blocks, node.age.expires_at_s, node.age.request))
            unseen.extend((at, child) for child in reversed(node.children.values()))
        return rows

    def restore(self, parent: int, blocks: bytes, expires_at_s: float, request: int) -> None:
        """Add the next row."""
        if not blocks:
            raise ValueError("blocks: found 0, allowed 1 or more")
        above = self._root if parent == -1 else self._restored[parent] if 0 <= parent < len(self._restored) else None
        if above is None or whole("blocks", blocks)[:BLOCK_BYTES] in above.children:
            raise ValueError(f"parent: found {parent}, allowed -1, or an earlier row without such a child")
        node = above.children[blocks[:BLOCK_BYTES]] = _Stretch(blocks, above, _Age(expires_at_s, request))
        self._list_leaf(node)
        self._block_count += block_count(blocks)
        self._restored.append(node)

    def _list_leaf(self, leaf: _Stretch) -> None:
        """Enter a leaf, or one whose age changed."""
        self._listed += 1
        heappush(self._leaves, (leaf.age, self._listed, leaf))
        if len(self._leaves) > self._leaves_max:
            self._leaves = [each for each in self._leaves if each[0] == each[2].age and not each[2].children]
            heapify(self._leaves)
            self._leaves_max = 2 * len(self._leaves) + _LEAVES_FIRST

    def _oldest(self) -> _Stretch | None:
        """Return the oldest leaf; None if the tree is empty."""
        while self._leaves:
            age, _, leaf = self._leaves[0]
            if age == leaf.age and not leaf.children:
                return leaf
            heappop(self._leaves)
        return None

    def _split(self, stretch: _Stretch, cut: int) -> None:
        """Move the blocks behind the first `cut` bytes into a stretch of their own."""
        behind = _Stretch(stretch.blocks[cut:], stretch, stretch.age)
        behind.children = stretch.children
        for child in behind.children.values():
            child.parent = behind
        if not behind.children:
            self._list_leaf(behind)
        stretch.blocks, stretch.children = stretch.blocks[:cut], {behind.blocks[:BLOCK_BYTES]: behind}

    def _extended(self, node: _Stretch, blocks: bytes, age: _Age) -> _Stretch:
        self._block_count += block_count(blocks)
        if node is not self._root and not node.children:
            node.blocks += blocks
            return node
        leaf = node.children[blocks[:BLOCK_BYTES]] = _Stretch(blocks, node, age)
        return leaf

    def _drop(self, blocks_max: int) -> int:
        """Drop the oldest leaf, or the deepest `blocks_max` of its blocks; return how many."""
        leaf = self._oldest()
        assert leaf is not None
        held = block_count(leaf.blocks)
        dropped = min(blocks_max, held)
        self._block_count -= dropped
        if dropped < held:
            leaf.blocks = leaf.blocks[: (held - dropped) * BLOCK_BYTES]
            return dropped
        leaf.age = _GONE
        parent = leaf.parent
        del parent.children[leaf.blocks[:BLOCK_BYTES]]
        if parent is not self._root and not parent.children:
            self._list_leaf(parent)
        return dropped


def new_routed_tree() -> RoutedTree:
    """Return an empty tree: in C++ where it was built."""
    built: Any = native.load()
    tree: RoutedTree = PythonRoutedTree() if built is None else built.RoutedTree()
    return tree
