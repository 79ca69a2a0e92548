"""What all implementations of a prefix index must answer alike, whatever all of them were told."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from indexer.index.outline import PassedRequest
from indexer.index.prefix_index import Hashes, PrefixIndex
from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import overlaps
from tests.contract.whole_tree import whole_tree

FORMS: list[Callable[[list[int]], Hashes]] = [list, tuple, pack_u64]
"""How sequence hashes may be handed in."""
Indexes = Mapping[str, PrefixIndex]


def same(told: Mapping[str, object]) -> None:
    expected = next(iter(told.values()))
    for name, answer in told.items():
        assert answer == expected, name


def compare_answers(indexes: Indexes, queries: list[list[int]]) -> None:
    """Compare a few overlaps, and all that is counted."""
    same({name: [overlaps(index, query) for query in queries] for name, index in indexes.items()})
    same({name: msgspec.structs.replace(index.statistics(), memory_bytes=0) for name, index in indexes.items()})


def compare_everything(
    random: Random, indexes: Indexes, queries: list[list[int]], blocks: list[int], ranks: Sequence[int]
) -> None:
    """Compare whatever can be asked of these blocks and registered ranks; nothing contradicts itself."""
    columns = max(ranks, default=0) + random.choice([1, 2, 9])
    forms = [random.choice(FORMS)(query) for query in queries]
    some = random.sample(ranks, min(5, len(ranks)))
    for name, index in indexes.items():
        assert index.self_check() == [], name
    same({name: matches(random, index, forms, columns) for name, index in indexes.items()})
    same({name: shown(index, blocks, some) for name, index in indexes.items()})


def matches(random: Random, index: PrefixIndex, queries: list[Hashes], columns: int) -> list[list[int]]:
    """Return the depths of all queries."""
    found, out = list[list[int]](), array("i", [8]) * (4 * columns)
    for query in queries:
        depths, expected = overlaps(index, query), array("i", bytes(16 * columns))
        for rank, each in depths.items():
            expected[rank::columns] = array("i", each)
        assert index.match(query, out) == max((each[-1] for each in depths.values()), default=0)
        assert out == expected
        some = array("I", random.sample(range(columns + 3), columns))  # any order, and some that are not registered
        assert index.match(query, out, some.tobytes()) == max((each[-1] for each in depths.values()), default=0)
        of_some = [depths.get(rank, (0, 0, 0, 0)) for rank in some]
        assert out.tolist() == [each[tier] for tier in TIERS for each in of_some]
        found.append(expected.tolist())
    return found


def shown(index: PrefixIndex, blocks: list[int], ranks: Sequence[int]) -> list[object]:
    return [
        [dumped(index, rank) for rank in ranks],
        [(index.bucket_digests(rank, tier), index.digest(rank, tier)) for rank in ranks for tier in TIERS],
        [index.children(block) for block in [None, *blocks]],
        [index.holders(block) for block in blocks],
        whole_tree(index),
    ]


def dumped(index: PrefixIndex, rank: int) -> set[HeldBlock]:
    blocks = [block for columns in index.dump(rank, 9) for block in columns.blocks()]
    place = {block.sequence_hash: at for at, block in enumerate(blocks)}
    assert len(place) == len(blocks)
    assert all(place.get(block.parent, -1) < at for at, block in enumerate(blocks) if block.parent is not None)
    return set(blocks)


def outlined(index: PrefixIndex, requests: list[PassedRequest]) -> Mapping[int, tuple[float, ...]]:
    """Return the outline's nodes by their last block; all of a node's blocks can be had."""
    outline = index.outline(requests)
    rows = list(outline.children(None, "subtree", 0, 100_000))
    for row in rows:  # which grows meanwhile
        rows += outline.children(outline.find(row.last), "subtree", 0, 100_000)
    found = {
        row.last: (row.first, row.blocks, row.subtree_blocks, row.depth_blocks, row.children, row.heat) for row in rows
    }
    assert len(found) == len(rows) == len(outline)
    assert outline.skipped_blocks == 0
    assert all(len(unpack_u64(index.chain(row.first, 100_000))) == row.blocks for row in rows[:5])
    return found
