"""What every prefix index shows to people: children, holders, and its longest, widest or freshest stretches."""

from typing import get_args

import pytest

from indexer.index.prefix_index import PrefixIndex, PrefixOrder, Stretch
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import GPU, MakeIndex, chain, forest, load, with_ranks


def stretch(blocks: list[int], **rest: object) -> Stretch:
    """Return the stretch of `blocks`, which begins a sequence and has no children unless told otherwise."""
    fields = {"parent": None, "depth_blocks": len(blocks), "holders": {0: 1}, "children": 0, "last_stored_s": 0.0}
    return Stretch(sequence_hash=blocks[-1], blocks=len(blocks), **fields | rest)  # type: ignore[arg-type]


def test_a_chain_is_one_stretch_however_it_was_told(make_index: MakeIndex) -> None:
    path = chain(300)
    for events in ([300], [1] * 300, [64] * 4 + [44], [7] * 42 + [6]):
        index, at = with_ranks(make_index()), 0
        for blocks in events:
            index.store(0, path[at - 1] if at else None, path[at : at + blocks], GPU, 5.0)
            at += blocks
        assert index.prefixes(10) == [stretch(path, last_stored_s=5.0)]


def test_a_stretch_without_holders_is_shown_while_blocks_are_behind_it(index: PrefixIndex) -> None:
    load(index, 0, [HeldBlock(8, 7, 1)], 3.0)
    assert index.prefixes(9, "holders") == [
        stretch([8], parent=7, depth_blocks=2, last_stored_s=3.0),
        stretch([7], holders={}, children=1, last_stored_s=index.prefixes(9, "holders")[1].last_stored_s),
    ]


def most(each: Stretch, order_by: PrefixOrder) -> float:
    return {"blocks": each.blocks, "holders": len(each.holders), "last_stored": each.last_stored_s}[order_by]


@pytest.mark.parametrize("order_by", get_args(PrefixOrder))
def test_the_first_are_the_first_of_all(index: PrefixIndex, order_by: PrefixOrder) -> None:
    forest(index)
    for at in range(40):
        index.store(at % 3, None, chain(1 + at % 7, seed=100 + at), GPU, at % 5)
    everything = index.prefixes(1000, order_by)
    assert everything == sorted(everything, key=lambda each: (-most(each, order_by), each.sequence_hash))
    for limit in (0, 1, 2, 17, len(everything), 10_000):
        assert index.prefixes(limit, order_by) == everything[:limit]
    assert sum(each.blocks for each in everything) == index.statistics().nodes
    assert sum(each.blocks * len(each.holders) for each in everything) == index.statistics().held_blocks


def test_a_stretch_bears_the_time_of_its_last_store(index: PrefixIndex) -> None:
    path = chain(6)
    index.store(0, None, path[:3], GPU, 10.0)
    index.store(0, path[2], path[3:], GPU, 20.0)
    index.store(1, None, [1, 2], GPU, 15.0)
    assert [(each.sequence_hash, each.last_stored_s) for each in index.prefixes(9, "last_stored")] == [
        (path[5], 20.0),
        (2, 15.0),
    ]


def test_an_older_time_told_later_does_not_make_a_stretch_older(index: PrefixIndex) -> None:
    index.store(0, None, [1, 2], GPU, 10.0)
    index.store(0, 2, [3], GPU, 5.0)
    index.store(1, None, [1, 2, 3], GPU, 4.0)
    assert [each.last_stored_s for each in index.prefixes(9)] == [10.0]
