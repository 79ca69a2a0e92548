"""Forests of blocks for random scenarios, their families, and what all implementations must answer alike."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random

import msgspec

from indexer.index.prefix_index import Hashes, PassedRequest, PrefixIndex
from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.events import TIERS, Removed, Stored, Tier
from kv_protocol.recovery import HeldBlock
from tests.contract.indexes import overlaps, whole_tree


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a scenario: its forest, its ranks, and how often each step is taken (weights by name)."""

    steps: dict[str, int]
    paths: int = 6
    path_blocks: int = 10
    event_blocks: int = 6
    ranks: tuple[int, int] = (2, 5)
    rank_max: int = 70
    tiers: tuple[Tier, ...] = (Tier.GPU, Tier.GPU, Tier.HOST)
    length: int = 50


_ANY = {"store": 6, "store_path": 4, "remove": 4, "remove_run": 3, "refill": 3, "clear": 1}
_RESTARTS = {"clear": 2, "clear_tier": 2, "drop": 2, "come_back": 3, "load_rows": 2, "repair_rows": 4, "copy_dump": 3}

FAMILIES: dict[str, Family] = {
    "holes": Family(steps={"store_path": 4, "remove": 8, "refill": 9, "store": 3}),
    "duplicates": Family(steps={"store_path": 6, "store": 8, "repeat": 8, "remove": 3, "remove_twice": 3}),
    "reordering": Family(steps={**_ANY, "reorder": 12}, event_blocks=4),
    "restarts": Family(steps={**_ANY, **_RESTARTS}, ranks=(3, 8)),
    "many ranks": Family(
        steps={**_ANY, "crowd": 3, "store_path": 9, "drop": 1, "come_back": 2, "copy_dump": 2, "remove_run": 9},
        ranks=(60, 200), rank_max=500, paths=4, path_blocks=12, length=45,
    ),
    "tiers": Family(steps={**_ANY, "move": 8, "clear_tier": 2, "load_rows": 1, "repair_rows": 2}, tiers=tuple(Tier)),
    "long chains": Family(
        steps={"store": 8, "store_path": 4, "remove_run": 10, "refill": 3, "copy_dump": 1},
        paths=4, path_blocks=300, event_blocks=90, length=30,
    ),
    "orphans": Family(
        steps={
            **_ANY, "orphan": 12, "reorder": 4, "clear": 2, "clear_tier": 3, "load_rows": 4,
            "repair_rows": 4, "restore": 2,
        },
        length=70,
    ),
    "snapshots": Family(steps={**_ANY, "orphan": 2, "restore": 5, "renew": 5, "load_rows": 1}, tiers=tuple(Tier)),
    "messages": Family(steps={**_ANY, "message": 14, "orphan": 1}, tiers=tuple(Tier)),
    "everything": Family(
        steps={
            **_ANY, **_RESTARTS, "orphan": 3, "reorder": 3, "repeat": 2, "remove_twice": 1,
            "move": 3, "message": 4, "restore": 1, "renew": 1,
        },
        paths=10, path_blocks=40, event_blocks=20, ranks=(3, 20), tiers=tuple(Tier), length=70,
    ),
}  # fmt: skip


class World:
    """A seeded forest: paths that fork from each other."""

    def __init__(self, random: Random, family: Family) -> None:
        self.parent_of: dict[int, int | None] = {}
        self.paths: list[list[int]] = []
        special = [0, 2**64 - 1]
        for _ in range(family.paths):
            stem = random.choice(self.paths) if self.paths and random.random() < 0.7 else []
            path = stem[: random.randint(0, len(stem))]
            for _ in range(random.randint(1, family.path_blocks)):
                is_special = special and random.random() < 0.02
                path.append(special.pop() if is_special else random.getrandbits(64))
            self.parent_of |= {block: parent for parent, block in pairwise([None, *path]) if block is not None}
            self.paths.append(path)

    def stored(self, path: list[int], first: int, stop: int, tier: Tier) -> Stored:
        """Return the store of path[first:stop]."""
        return Stored(tuple(path[first:stop]), path[first - 1] if first else None, first, tier)

    def cut(self, random: Random, family: Family, path: list[int], tier: Tier) -> list[Stored]:
        """Return the stores of a whole path, in events of random sizes."""
        events, at = [], 0
        while at < len(path):
            stop = at + random.randint(1, family.event_blocks)
            events.append(self.stored(path, at, stop, tier))
            at = stop
        return events

    def query(self, random: Random) -> list[int]:
        """Return a path, a part of one, the beginning of one with the rest of another, or something unheard of."""
        path, other = random.choice(self.paths), random.choice(self.paths)
        at = random.randint(0, len(path))
        return random.choice([path, path[:at], path[at:], path[:at] + other[at:], [*path[:at], 7, *path[at:]]])


def removals(random: Random, blocks: list[int], tier: Tier) -> list[Removed]:
    """Return the removal of `blocks`, told from the root, from the leaf or shuffled, in one event or in many."""
    blocks = list(blocks)
    order = random.randrange(3)
    if order == 1:
        blocks.reverse()
    elif order == 2:
        random.shuffle(blocks)
    each = random.choice([1, 3, 64, max(1, len(blocks))])
    return [Removed(tuple(blocks[at : at + each]), tier) for at in range(0, len(blocks), each)]


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
    """Compare whatever can be asked of these blocks and registered ranks."""
    columns = max(ranks, default=0) + random.choice([1, 2, 9])
    forms = [random.choice(FORMS)(query) for query in queries]
    some = random.sample(ranks, min(5, len(ranks)))
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
