"""What every prefix index shows of its shape: chains without forks, what lies behind each, and how warm it is."""

from collections.abc import Sequence

import pytest

from indexer.index.outline import OUTLINE_ORDERS, Outline, OutlineNode, PassedRequest
from indexer.index.prefix_index import PrefixIndex
from kv_protocol.codec import unpack_u64
from tests.contract.indexes import GPU, HOST, chain


def nodes(outline: Outline, node: int | None = None) -> list[OutlineNode]:
    """Return the node's children, the first by blocks in the subtree first."""
    return list(outline.children(node, "subtree", 0, 1000))


def behind(outline: Outline, last: int) -> list[OutlineNode]:
    """Return the children of the node that ends with `last`."""
    node = outline.find(last)
    assert node is not None
    return nodes(outline, node)


def test_a_chain_is_one_node_whichever_ranks_hold_its_blocks(index: PrefixIndex) -> None:
    path = chain(9)
    index.store(0, None, path, GPU, 3.0)
    index.store(1, None, path[:4], HOST, 5.0)
    outline = index.outline()
    assert nodes(outline) == [OutlineNode(path[0], path[-1], 9, 9, 9, 0, 0.0, 0.0, 5.0)]


def test_a_fork_ends_a_node_and_its_subtree_is_counted(index: PrefixIndex) -> None:
    path, left, right = chain(6), [71, 72, 73], [81]
    index.store(0, None, path, GPU, 1.0)
    index.store(1, path[3], left, GPU, 1.0)
    index.store(2, path[3], right, GPU, 1.0)
    outline = index.outline()
    [root] = nodes(outline)
    assert (root.first, root.last, root.blocks, root.subtree_blocks, root.children) == (path[0], path[3], 4, 10, 3)
    found = [(each.last, each.blocks, each.depth_blocks) for each in behind(outline, path[3])]
    assert found == [(73, 3, 7), (path[5], 2, 6), (81, 1, 5)]
    assert [each.last for each in outline.path(outline.find(73) or 0, 10)] == [73, path[3]]
    assert outline.path(outline.find(73) or 0, 1) == outline.path(outline.find(73) or 0, 10)[:1]


def test_heat_is_summed_from_the_leaves_up(index: PrefixIndex) -> None:
    index.store(0, None, [1, 2, 3], GPU, 0)
    index.store(0, 2, [9], GPU, 0)
    index.store(0, None, [50], GPU, 0)
    outline = index.outline(
        [
            PassedRequest(3, 1.0, 7.0),
            PassedRequest(9, 0.5, 8.0),
            PassedRequest(1, 0.25, 3.0),
            PassedRequest(4, 9.0, 9.0),
        ]
    )
    warm, cold = nodes(outline)
    assert (warm.heat, warm.used_s, cold.heat, cold.used_s) == (1.75, 8.0, 0.0, 0.0)
    assert [(each.last, each.heat, each.used_s) for each in outline.children(outline.find(2), "heat", 0, 9)] == [
        (3, 1.0, 7.0),
        (9, 0.5, 8.0),
    ]


@pytest.mark.parametrize("order_by", OUTLINE_ORDERS)
def test_children_are_paged_in_one_order(index: PrefixIndex, order_by: str) -> None:
    for at in range(40):
        index.store(at % 3, None, chain(1 + at % 7, seed=100 + at), GPU, at % 5)
    ends = [chain(1 + at % 7, seed=100 + at)[-1] for at in range(40)]
    outline = index.outline([PassedRequest(ends[at], float(at % 4), 1.0) for at in range(40)])

    def page(offset: int, limit: int) -> Sequence[OutlineNode]:
        return outline.children(None, order_by, offset, limit)  # type: ignore[arg-type]

    most = {"subtree": "subtree_blocks", "heat": "heat", "recent": "stored_s", "blocks": "blocks"}[order_by]
    rows = page(0, 1000)
    assert len(rows) == outline.child_count(None) == 40
    assert rows == sorted(rows, key=lambda each: (-getattr(each, most), each.first))
    assert [*page(0, 7), *page(7, 20), *page(27, 13), *page(40, 5)] == rows


def test_a_chain_is_told_from_any_of_its_blocks_to_the_fork(index: PrefixIndex) -> None:
    path = chain(300)
    for at in range(0, 300, 7):
        index.store(at % 3, path[at - 1] if at else None, path[at : at + 7], GPU, 0)
    index.store(0, path[200], [5], GPU, 0)
    assert unpack_u64(index.chain(path[0], 1000)) == tuple(path[:201])
    assert unpack_u64(index.chain(path[60], 100)) == tuple(path[60:160])
    assert unpack_u64(index.chain(path[250], 1000)) == tuple(path[250:])
    assert index.chain(path[0], 0) == b""
