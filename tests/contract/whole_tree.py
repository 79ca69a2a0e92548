"""All that a prefix index shows of its nodes and their blocks, for comparisons."""

from typing import NamedTuple

from indexer.index.outline import OUTLINE_ORDERS, Outline, OutlineNode
from indexer.index.prefix_index import PrefixIndex
from kv_protocol.codec import unpack_u64

MOST = {"subtree": "subtree_blocks", "heat": "heat", "recent": "stored_s", "blocks": "blocks"}
"""The field of a node by which children are ordered."""
ALL = 1_000_000


class WholeNode(NamedTuple):
    """The last block of the node before it, its row, and its blocks, each with its holders."""

    above: int | None
    row: OutlineNode
    blocks: list[tuple[int, dict[int, int]]]


def whole_tree(index: PrefixIndex, *, is_timed: bool = False) -> list[WholeNode]:
    """Return every node, parents first; without `is_timed` no store times, which are upper bounds."""
    outline, found = index.outline(), list[WholeNode]()
    pending: list[int | None] = [None]
    for above in pending:  # which grows meanwhile
        rows = _children(outline, None if above is None else outline.find(above))
        assert index.children(above) == sorted(row.first for row in rows)
        for row in rows:
            blocks = unpack_u64(index.chain(row.first, ALL))
            assert (len(blocks), blocks[-1]) == (row.blocks, row.last)
            shown = row if is_timed else row._replace(stored_s=0.0)
            found.append(WholeNode(above, shown, [(block, index.holders(block)) for block in blocks]))
            pending.append(row.last)
    counted = index.statistics()
    assert (len(found), sum(each.row.blocks for each in found)) == (len(outline), counted.nodes)
    assert sum(len(ranks) for each in found for _, ranks in each.blocks) == counted.held_blocks
    return found


def _children(outline: Outline, node: int | None) -> list[OutlineNode]:
    """Return the node's children by size; in any other order they are the same."""
    found = list(outline.children(node, "subtree", 0, ALL))
    for order in OUTLINE_ORDERS:
        in_order = sorted(found, key=lambda each: (-getattr(each, MOST[order]), each.first))
        assert list(outline.children(node, order, 0, ALL)) == in_order, order
    return found
