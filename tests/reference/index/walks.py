"""Walks over all nodes of the reference index, for views and snapshots."""

from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import NamedTuple

from indexer.index.prefix_index import PrefixOrder, Stretch
from tests.reference.index.nodes import Forest

_MOST: dict[PrefixOrder, Callable[[Stretch], float]] = {
    "blocks": lambda stretch: stretch.blocks,
    "holders": lambda stretch: len(stretch.holders),
    "last_stored": lambda stretch: stretch.last_stored_s,
}


class WalkedStretch(NamedTuple):
    """The blocks of a `Stretch`, in chain order, and the number of blocks up to its end."""

    hashes: list[int]
    depth_blocks: int


def children_of(forest: Forest, sequence_hash: int | None) -> list[int]:
    """Return the blocks whose parent is `sequence_hash` (None: those without a known one), ascending."""
    return sorted(block for block, node in forest.items() if node.parent == sequence_hash)


def walk(forest: Forest) -> Iterator[WalkedStretch]:
    """Yield every node once, in stretches, each after the one that its parent is in."""
    behind: dict[int | None, list[int]] = {}
    for block, node in forest.items():
        behind.setdefault(node.parent, []).append(block)
    pending = [(block, 0) for block in behind.get(None, ())]
    while pending:
        first, depth_blocks = pending.pop()
        hashes, after = [first], behind.get(first, [])
        while len(after) == 1 and forest[after[0]].holders == forest[first].holders:
            hashes.append(after[0])
            after = behind.get(hashes[-1], [])
        depth_blocks += len(hashes)
        yield WalkedStretch(hashes, depth_blocks)
        pending += [(block, depth_blocks) for block in after]


def stretches(forest: Forest, limit: int, order_by: PrefixOrder) -> list[Stretch]:
    """Return the first `limit` stretches in descending order of `order_by`; equal ones by ascending hash."""
    most = _MOST[order_by]
    return nsmallest(
        limit, (_stretch(forest, each) for each in walk(forest)), lambda each: (-most(each), each.sequence_hash)
    )


def _stretch(forest: Forest, walked: WalkedStretch) -> Stretch:
    last = forest[walked.hashes[-1]]
    return Stretch(
        sequence_hash=walked.hashes[-1],
        parent=forest[walked.hashes[0]].parent,
        blocks=len(walked.hashes),
        depth_blocks=walked.depth_blocks,
        holders=last.holder_bits(),
        children=last.child_count,
        last_stored_s=max(forest[block].last_stored_s for block in walked.hashes),
    )
