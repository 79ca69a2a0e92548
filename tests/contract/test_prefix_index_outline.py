"""What every prefix index shows of its shape: chains without forks, what lies behind each, and how warm it is."""

from collections.abc import Sequence

import pytest

from indexer.index.prefix_index import OUTLINE_ORDERS, Outline, OutlineNode, PassedRequest, PrefixIndex
from kv_protocol.codec import unpack_u64
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import GPU, HOST, MOST, MakeIndex, chain, forest, load, whole_tree, with_ranks


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


def test_a_chain_is_one_node_however_it_was_told(make_index: MakeIndex) -> None:
    path = chain(300)
    for events in ([300], [1] * 300, [64] * 4 + [44], [7] * 42 + [6]):
        index, at = with_ranks(make_index()), 0
        for blocks in events:
            index.store(0, path[at - 1] if at else None, path[at : at + blocks], GPU, 5.0)
            at += blocks
        assert nodes(index.outline()) == [OutlineNode(path[0], path[-1], 300, 300, 300, 0, 0.0, 0.0, 5.0)]


def test_a_block_without_holders_is_shown_while_blocks_are_behind_it(index: PrefixIndex) -> None:
    load(index, 0, [HeldBlock(8, 7, 1)], 3.0)
    [node] = whole_tree(index)
    assert (node.row.first, node.row.last, node.blocks) == (7, 8, [(7, {}), (8, {0: 1})])
    index.remove(0, [8], GPU)
    assert whole_tree(index) == []


def test_a_node_bears_the_time_of_its_last_store(index: PrefixIndex) -> None:
    path = chain(6)
    index.store(0, None, path[:3], GPU, 10.0)
    index.store(0, path[2], path[3:], GPU, 20.0)
    index.store(1, None, [1, 2], GPU, 15.0)
    found = index.outline().children(None, "recent", 0, 9)
    assert [(each.last, each.stored_s) for each in found] == [(path[5], 20.0), (2, 15.0)]


def test_an_older_time_told_later_does_not_make_a_node_older(index: PrefixIndex) -> None:
    index.store(0, None, [1, 2], GPU, 10.0)
    index.store(0, 2, [3], GPU, 5.0)
    index.store(1, None, [1, 2, 3], GPU, 4.0)
    assert [each.stored_s for each in nodes(index.outline())] == [10.0]


def test_each_block_is_in_one_node_and_is_held_as_was_told(index: PrefixIndex) -> None:
    paths = forest(index)
    trunk, left, right, other = paths[0], paths[1][2:], paths[2][3:], paths[3]
    assert [(each.above, each.blocks) for each in whole_tree(index)] == [
        (None, [(trunk[0], {0: 2}), (trunk[1], {0: 3})]),
        (None, [(other[0], {0: 4}), (other[1], {}), (other[2], {0: 4})]),
        (trunk[1], [(left[0], {0: 2})]),
        (trunk[1], [(trunk[2], {0: 1}), (trunk[3], {0: 1})]),
        (left[0], [(left[1], {0: 2}), (left[2], {0: 2})]),
        (left[0], [(right[0], {0: 1}), (right[1], {0: 1})]),
    ]


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

    rows = page(0, 1000)
    assert len(rows) == outline.child_count(None) == 40
    assert rows == sorted(rows, key=lambda each: (-getattr(each, MOST[order_by]), each.first))
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
