"""Chains of sequence hashes, packed: little-endian u64s of a prompt's full blocks, in their order.

    chain          `bytes`; a sequence hash names its block and all before it, so equal hashes mean equal prefixes
    ChainCounts    the chains of many keys (ranks), each block counted once per key, however many of its chains have it

A `ChainCounts` is one tree for all keys. A node is a stretch: consecutive blocks, without a fork, where chains end only
at its end. It counts, per key, the chains that go through it.

    add, remove    cost one step per node on the path: by forks, not by blocks
    depths         one walk finds every key's longest prefix of a chain
    a node         exists while a chain goes through it, and is joined with its only child once no chain ends at it

Stretches are compared as complete byte strings; only their length is presumed.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

BLOCK_BYTES = 8

K = TypeVar("K", bound=Hashable)


def whole(field: str, packed: bytes) -> bytes:
    """Return `packed`, which is of whole blocks; `ValueError` with the field otherwise."""
    if len(packed) % BLOCK_BYTES:
        raise ValueError(f"{field}: found {len(packed)}, allowed a multiple of {BLOCK_BYTES} bytes")
    return packed


def block_count(chain: bytes) -> int:
    """Return how many blocks `chain` has."""
    return len(chain) // BLOCK_BYTES


def shared_blocks(chain: bytes, other: bytes, start: int = 0) -> int:
    """Return how many leading blocks of `chain` equal those of `other` from block `start` on.

    Found by looking at O(log n) single blocks, and proved by one comparison. Exact for any bytes: where the proof
    fails, which it cannot for chains, slices are compared instead.
    """
    offset = start * BLOCK_BYTES
    if other.startswith(chain, offset):
        return len(chain) // BLOCK_BYTES
    low, high = 0, min(len(chain), len(other) - offset) & -BLOCK_BYTES
    while low < high:  # in bytes: the block before `low` is alike, the one at `high` is not, or is not there
        middle = (low + high) // 2 & -BLOCK_BYTES
        if chain[middle : middle + BLOCK_BYTES] == other[offset + middle : offset + middle + BLOCK_BYTES]:
            low = middle + BLOCK_BYTES
        else:
            high = middle
    if other.startswith(chain[:low], offset):
        return low // BLOCK_BYTES
    return _shared_slices(chain, other[offset:], low // BLOCK_BYTES)


def _shared_slices(chain: bytes, other: bytes, high: int) -> int:
    """Return how many leading blocks are equal, fewer than `high`."""
    low = 0
    while low + 1 < high:
        middle = (low + high) // 2
        if chain[: middle * BLOCK_BYTES] == other[: middle * BLOCK_BYTES]:
            low = middle
        else:
            high = middle
    return low


class _Stretch(Generic[K]):
    """A node: its blocks, how many chains of each key go through it, and how many chains end at its end."""

    __slots__ = ("blocks", "children", "counts", "ends", "parent")

    def __init__(self, blocks: bytes, parent: "_Stretch[K] | None", counts: dict[K, int]) -> None:
        self.blocks = blocks
        self.parent = parent
        self.counts = counts
        self.children: dict[bytes, _Stretch[K]] = {}  # by their first block
        self.ends = 0


class Path(NamedTuple, Generic[K]):
    """One added chain: the argument of `remove`, once."""

    key: K
    end: _Stretch[K]


class ChainCounts(Generic[K]):
    """The chains of all keys. The same chain may be added any number of times, for one key and for several."""

    def __init__(self) -> None:
        self._root: _Stretch[K] = _Stretch(b"", None, {})
        self._blocks: dict[K, int] = {}

    def add(self, key: K, chain: bytes) -> Path[K]:
        """Add a chain, whose length is a multiple of `BLOCK_BYTES`, to the key; return the path to remove it with."""
        node, at, new_bytes = self._root, 0, 0
        while at < len(chain):
            child = node.children.get(chain[at : at + BLOCK_BYTES])
            if child is None:
                child = _Stretch(chain[at:], node, {})
                node.children[chain[at : at + BLOCK_BYTES]] = child
            elif not chain.startswith(child.blocks, at):
                child = self._split(child, shared_blocks(child.blocks, chain, at // BLOCK_BYTES))
            node = child
            at += len(node.blocks)
            count = node.counts.get(key, 0)
            node.counts[key] = count + 1
            if not count:
                new_bytes += len(node.blocks)
        node.ends += 1
        if new_bytes:
            self._blocks[key] = self._blocks.get(key, 0) + new_bytes // BLOCK_BYTES
        return Path(key, node)

    @staticmethod
    def _split(stretch: _Stretch[K], length: int) -> _Stretch[K]:
        """Return a new node of the first `length` blocks; `stretch`, at which chains end, keeps the later ones."""
        parent, cut = stretch.parent, length * BLOCK_BYTES
        assert parent is not None
        front = _Stretch(stretch.blocks[:cut], parent, stretch.counts.copy())
        parent.children[stretch.blocks[:BLOCK_BYTES]] = front
        stretch.blocks, stretch.parent = stretch.blocks[cut:], front
        front.children[stretch.blocks[:BLOCK_BYTES]] = stretch
        return front

    def remove(self, path: Path[K]) -> None:
        """Remove the chain that `add` returned `path` for; each path only once."""
        key, node = path
        node.ends -= 1
        freed_bytes = 0
        at: _Stretch[K] = node
        while at.parent is not None:
            parent, left = at.parent, at.counts[key] - 1
            if left:
                at.counts[key] = left
            else:
                del at.counts[key]
                freed_bytes += len(at.blocks)
            if not at.counts:
                del parent.children[at.blocks[:BLOCK_BYTES]]
            elif not at.ends and len(at.children) == 1:
                self._join(at, parent)
            at = parent
        if freed_bytes:
            self._free(key, freed_bytes // BLOCK_BYTES)

    @staticmethod
    def _join(stretch: _Stretch[K], parent: _Stretch[K]) -> None:
        """Merge `stretch` into its only child, which stays, since chains end there."""
        (child,) = stretch.children.values()
        child.blocks, child.parent = stretch.blocks + child.blocks, parent
        parent.children[child.blocks[:BLOCK_BYTES]] = child

    def _free(self, key: K, blocks: int) -> None:
        left = self._blocks[key] - blocks
        if left:
            self._blocks[key] = left
        else:
            del self._blocks[key]

    def depths(self, chain: bytes) -> dict[K, int]:
        """Return for each key with any how many leading blocks of `chain` its chains have."""
        depths: dict[K, int] = {}
        children, at = self._root.children, 0
        keys, depth = self._root.counts, 0
        while (node := children.get(chain[at : at + BLOCK_BYTES])) is not None:
            if len(node.counts) < len(keys):  # no key is below that is not above: as many are the same
                depths.update(dict.fromkeys(keys, depth))
            keys = node.counts
            if not chain.startswith(node.blocks, at):
                depth += shared_blocks(node.blocks, chain, depth)
                break
            at += len(node.blocks)
            depth = at // BLOCK_BYTES
            children = node.children
        depths.update(dict.fromkeys(keys, depth))
        return depths

    def blocks(self, key: K) -> int:
        """Return how many distinct blocks the key's chains have."""
        return self._blocks.get(key, 0)

    def node_count(self) -> int:
        """Return how many stretches there are; at most two per chain. Walks all of them."""
        count, unseen = -1, [self._root]
        while unseen:
            count += 1
            unseen.extend(unseen.pop().children.values())
        return count

    def is_empty(self) -> bool:
        """Whether it has no chain, and no remains of former ones."""
        return not self._root.children and not self._blocks and not self._root.ends
