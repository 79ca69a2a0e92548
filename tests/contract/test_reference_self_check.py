"""The reference's self-check finds what is planted; where it finds nothing, there is nothing."""

from collections.abc import Callable

import pytest

from indexer.index.parked_blocks import ParkedBlock
from indexer.index.reference import ReferenceIndex
from indexer.index.reference_nodes import Node
from kv_protocol.events import Tier
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import GPU, HOST, load, with_ranks
from tests.support.planting import inside, plant

Plant = Callable[[ReferenceIndex], object]


def close_circle(index: ReferenceIndex) -> None:
    inside(index, "_nodes")[1].parent = 3
    inside(index, "_nodes")[3].child_count = 1


PLANTED: dict[str, tuple[Plant, str]] = {
    "a node less": (lambda index: inside(index, "_nodes").pop(2), "node 3: its parent 2 has no node"),
    "a child too many": (
        lambda index: setattr(inside(index, "_nodes")[3], "child_count", 1),
        "node 3: counts 1 children, has 0",
    ),
    "a leaf without holders": (
        lambda index: inside(index, "_nodes").update({8: Node(None, 0)}),
        "node 8: no rank holds it, and no block follows it",
    ),
    "a parent unknown and named": (
        lambda index: setattr(inside(index, "_nodes")[3], "parent_known", False),
        "node 3: has a parent that is not known",
    ),
    "a circle": (close_circle, "5 nodes, of which 2 are reached from a first block: there is a circle"),
    "a holder that knows nothing of it": (
        lambda index: inside(index, "_nodes")[3].holders.__setitem__(Tier.DISK, 2),
        "rank 1: holds 3 on tiers 0100 by the node, 0000 by the rank",
    ),
    "a block that knows nothing of its holder": (
        lambda index: inside(index, "_ranks")[1].add(2, HOST),
        "rank 1: holds 2 on tiers 0000 by the node, 0010 by the rank",
    ),
    "a digest that is off": (
        lambda index: inside(index, "_ranks")[0].digests[GPU].add(77),
        "rank 0: the digest of tier 0 is not that of its blocks",
    ),
    "a parked block whose parent is there": (
        lambda index: inside(index, "_parked").park(ParkedBlock(0, 9, GPU), 3, 0),
        "block 9 waits for 3, which has a node",
    ),
    "a parked block of an unknown rank": (
        lambda index: inside(index, "_parked").park(ParkedBlock(7, 9, GPU), 10, 0),
        "a block of rank 7 waits, and the rank is unknown",
    ),
    "a count of holdings that is off": (
        lambda index: plant(index, "_holdings", 9),
        "9 holdings counted, 4 there",
    ),
}


def filled() -> ReferenceIndex:
    index = ReferenceIndex()
    with_ranks(index)
    index.store(0, None, [1, 2, 3], GPU, 0)
    load(index, 1, [HeldBlock(5, 4, 2)])
    index.store(2, 99, [98], GPU, 0)
    return index


def test_nothing_is_found_where_nothing_was_planted() -> None:
    assert filled().self_check() == []


@pytest.mark.parametrize(("plant", "found"), PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_found(plant: Plant, found: str) -> None:
    index = filled()
    plant(index)
    assert found in index.self_check()
