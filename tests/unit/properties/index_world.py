"""Forests of blocks for random scenarios, and the families of scenarios."""

from itertools import pairwise
from random import Random

import msgspec

from kv_protocol.events import Removed, Stored, Tier


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a scenario: its forest, its ranks, and how often each step is taken (weights by name)."""

    steps: dict[str, int]
    paths: int = 6
    path_blocks: int = 10
    event_blocks: int = 6
    ranks: tuple[int, int] = (2, 5)
    rank_max: int = 70
    tiers: tuple[Tier, ...] = (Tier.GPU, Tier.GPU, Tier.HOST)
    parked_max: int = 65_536
    length: int = 50


_ANY = {"store": 6, "store_path": 4, "remove": 4, "remove_run": 3, "refill": 3, "expire": 1, "clear": 1}
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
    "parked": Family(
        steps={
            **_ANY, "orphan": 12, "reorder": 4, "expire": 5, "clear": 2, "clear_tier": 3, "load_rows": 4,
            "repair_rows": 4, "restore": 2,
        },
        parked_max=4, length=70,
    ),
    "snapshots": Family(steps={**_ANY, "orphan": 2, "restore": 5, "renew": 5, "load_rows": 1}, tiers=tuple(Tier)),
    "messages": Family(steps={**_ANY, "message": 14, "orphan": 1}, tiers=tuple(Tier)),
    "everything": Family(
        steps={
            **_ANY, **_RESTARTS, "orphan": 3, "reorder": 3, "repeat": 2, "remove_twice": 1,
            "move": 3, "message": 4, "restore": 1, "renew": 1,
        },
        paths=10, path_blocks=40, event_blocks=20, ranks=(3, 20), tiers=tuple(Tier), parked_max=40, length=70,
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
