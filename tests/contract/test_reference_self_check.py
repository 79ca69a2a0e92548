"""The reference's self-check finds what is planted; where it finds nothing, there is nothing."""

from collections.abc import Callable

import pytest

from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import GPU, load, with_ranks
from tests.reference.index.index import ReferenceIndex
from tests.support.planting import inside

Plant = Callable[[ReferenceIndex], object]


def close_circle(index: ReferenceIndex) -> None:
    inside(index, "_nodes")[1].parent = 3
    inside(index, "_nodes")[3].child_count = 1


PLANTED: dict[str, tuple[Plant, str]] = {
    "a node less": (lambda index: inside(index, "_nodes").pop(2), "node 3: its parent 2 has no node"),
    "a circle": (close_circle, "5 nodes, of which 2 are reached from a first block: there is a circle"),
    "a digest that is off": (
        lambda index: inside(index, "_ranks")[0].digests[GPU].add(77),
        "rank 0: the digest of tier 0 is not that of its blocks",
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
