"""The implementations of a prefix index, words for what is asked of each of them, and all that one shows."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from indexer.index.prefix_index import OUTLINE_ORDERS, RANKS_MAX, Depths, Hashes, Outline, OutlineNode, PrefixIndex
from indexer.native.index import NativeIndex
from kv_protocol.codec import unpack_u64
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock, block_columns
from kv_protocol.splitmix import splitmix64
from tests.reference.index.index import ReferenceIndex

GPU, HOST, DISK, EXTERNAL = TIERS
U64_MAX = 2**64 - 1


class MakeIndex(Protocol):
    def __call__(self, *, memory_bytes_max: int = ...) -> PrefixIndex: ...


IMPLEMENTATIONS: dict[str, MakeIndex] = {
    "python": ReferenceIndex,
    "native": NativeIndex,
}


def with_ranks(index: PrefixIndex, ranks: int = 3) -> PrefixIndex:
    for rank in range(ranks):
        index.register(rank)
    return index


def chain(length: int, seed: int = 1) -> list[int]:
    """Return a prefix of `length` blocks, whose hashes fall into all buckets of a digest."""
    return [splitmix64(seed * 1_000_000 + at) for at in range(length)]


def both(blocks: int) -> Depths:
    return (blocks,) * 4


def overlaps(index: PrefixIndex, hashes: Hashes) -> dict[int, Depths]:
    """Return the depths of every rank that holds at least the first block on some tier."""
    out = np.empty((len(TIERS), RANKS_MAX), np.int32)
    index.match(hashes, out.data)
    return {int(rank): tuple(out[:, rank].tolist()) for rank in out[-1].nonzero()[0]}


def dumped(index: PrefixIndex, rank: int) -> list[HeldBlock]:
    return [block for columns in index.dump(rank) for block in columns.blocks()]


def load(index: PrefixIndex, rank: int, rows: Iterable[HeldBlock], now_s: float = 0) -> None:
    index.load(rank, block_columns(rows), now_s)


def held(index: PrefixIndex, rank: int) -> dict[int, tuple[int | None, int]]:
    return {block.sequence_hash: (block.parent, block.tier_bits) for block in dumped(index, rank)}


def is_parents_first(blocks: Sequence[HeldBlock]) -> bool:
    place = {block.sequence_hash: at for at, block in enumerate(blocks)}
    return all(place.get(block.parent, -1) < at for at, block in enumerate(blocks) if block.parent is not None)


def forest(index: PrefixIndex) -> list[list[int]]:
    """Rank 0 holds two trees with forks, on several tiers, with a hole; return its paths."""
    trunk, left, right, other = chain(4), chain(3, seed=2), chain(2, seed=3), chain(3, seed=4)
    index.store(0, None, trunk, GPU, 0)
    index.store(0, trunk[1], left, HOST, 0)
    index.store(0, left[0], right, GPU, 0)
    index.store(0, None, other, DISK, 0)
    index.store(0, None, trunk[:2], HOST, 0)
    index.remove(0, [other[1]], DISK)
    index.remove(0, [trunk[0]], GPU)
    return [trunk, trunk[:2] + left, trunk[:2] + left[:1] + right, other]


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
    assert sum(index.memory().values()) == counted.memory_bytes
    return found


def assert_sound(index: PrefixIndex, *ranks: int) -> None:
    """Assert that counts and digests are those of the blocks shown: of all ranks with blocks, and of `ranks`."""
    blocks = [each for node in whole_tree(index) for each in node.blocks]
    for rank in {*ranks, *(rank for _, holders in blocks for rank in holders)}:
        known = {block: holders[rank] for block, holders in blocks if rank in holders}
        assert {block: bits for block, (_, bits) in held(index, rank).items()} == known
        for tier in TIERS:
            on_tier = SetDigest(block for block, bits in known.items() if bits >> tier & 1)
            assert index.digest(rank, tier) == on_tier.of_tier(tier)


def _children(outline: Outline, node: int | None) -> list[OutlineNode]:
    """Return the node's children by size; in any other order they are the same."""
    found = list(outline.children(node, "subtree", 0, ALL))
    for order in OUTLINE_ORDERS:
        in_order = sorted(found, key=lambda each: (-getattr(each, MOST[order]), each.first))
        assert list(outline.children(node, order, 0, ALL)) == in_order, order
    return found
