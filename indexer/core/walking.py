"""Walking the nodes of the reference index, for people and for snapshots. Each walk costs a look at every node."""

from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import NamedTuple, get_args

from indexer.core.nodes import Forest
from indexer.core.prefix_index import PrefixOrder, Stretch
from kv_protocol.errors import LimitExceeded

_ORDERS: dict[str, Callable[[Stretch], float]] = {
    "blocks": lambda stretch: stretch.blocks,
    "holders": lambda stretch: len(stretch.holders),
    "last_stored": lambda stretch: stretch.last_stored_s,
}


class Run(NamedTuple):
    """Blocks in a row, as long as can be, with the same holders and no fork; `depth_blocks` up to its end."""

    hashes: list[int]
    depth_blocks: int


def children_of(forest: Forest, sequence_hash: int | None) -> list[int]:
    """Return the blocks whose parent is `sequence_hash` (None: those without a known one), ascending."""
    return sorted(block for block, node in forest.items() if node.parent == sequence_hash)


def runs(forest: Forest) -> Iterator[Run]:
    """Yield every node once, in runs, each after the run that holds its parent."""
    behind: dict[int | None, list[int]] = {}
    for block, node in forest.items():
        behind.setdefault(node.parent, []).append(block)
    pending = [(block, 0) for block in behind.get(None, ())]
    while pending:
        first, depth_blocks = pending.pop()
        run, after = [first], behind.get(first, [])
        while len(after) == 1 and forest[after[0]].holders == forest[first].holders:
            run.append(after[0])
            after = behind.get(run[-1], [])
        depth_blocks += len(run)
        yield Run(run, depth_blocks)
        pending += [(block, depth_blocks) for block in after]


def stretches(forest: Forest, limit: int, order_by: PrefixOrder) -> list[Stretch]:
    """Return the first `limit` runs by what is asked, most first; among equals, the smallest last hash first."""
    if limit < 0:
        raise LimitExceeded("limit", limit, "0 or more")
    if order_by not in _ORDERS:
        raise LimitExceeded("order_by", order_by, ", ".join(get_args(PrefixOrder)))
    most = _ORDERS[order_by]
    return nsmallest(
        limit, (_stretch(forest, run) for run in runs(forest)), lambda each: (-most(each), each.sequence_hash)
    )


def _stretch(forest: Forest, run: Run) -> Stretch:
    last = forest[run.hashes[-1]]
    return Stretch(
        sequence_hash=run.hashes[-1],
        parent=forest[run.hashes[0]].parent,
        blocks=len(run.hashes),
        depth_blocks=run.depth_blocks,
        holders=last.holder_bits(),
        children=last.child_count,
        last_stored_s=max(forest[block].last_stored_s for block in run.hashes),
    )
