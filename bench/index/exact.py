"""Whether an index answers correctly: scenarios, and storms of random events with known truth. Standard library only.

The truth: the last event of a block decides whether a rank holds it, in any order and number of events; the depth of a
rank is the number of blocks it holds from the first block on.

    orderly      an engine's events: blocks are stored behind one that is held, and only held ones are removed
    disorderly   any event at any time: children before parents, stored twice, removed and not there
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.index.data import ScheduledStore, chain, numbers, pack
from bench.index.subjects import IndexCall, Subject

CHAINS, DEPTH, RANKS, EVENTS = 8, 24, 4, 1500
"""Of a storm."""


class CacheChange(NamedTuple):
    """One event: a rank stores blocks behind a parent, or removes them."""

    kind: str
    blocks: Sequence[int]
    parent: int | None = None


class Scenario(NamedTuple):
    """Events of rank 0, whose blocks are 1, 2, 3, ... in chain order, and how many of them it holds from 1 on then."""

    changes: tuple[CacheChange, ...]
    depth: int


_FIVE = CacheChange("store", range(1, 6))
SCENARIOS = {
    "hole": Scenario((_FIVE, CacheChange("remove", [3])), 2),
    "hole, refilled": Scenario((_FIVE, CacheChange("remove", [3]), CacheChange("store", [3], 2)), 5),
    "ten blocks of twenty, refilled": Scenario(
        (
            CacheChange("store", range(1, 21)),
            CacheChange("remove", range(6, 16)),
            CacheChange("store", range(6, 16), 5),
        ),
        20,
    ),
    "first block, refilled": Scenario((_FIVE, CacheChange("remove", [1]), CacheChange("store", [1])), 5),
    "child before parent": Scenario((CacheChange("store", [3, 4], 2), CacheChange("store", [1, 2])), 4),
    "stored twice": Scenario((_FIVE, _FIVE), 5),
    "stored twice, removed once": Scenario((_FIVE, _FIVE, CacheChange("remove", [5])), 4),
    "removed twice, refilled": Scenario(
        (_FIVE, CacheChange("remove", [3]), CacheChange("remove", [3]), CacheChange("store", [3], 2)), 5
    ),
    "unknown block among the removed": Scenario((_FIVE, CacheChange("remove", [99, 4])), 3),
    "removed, parents first": Scenario((_FIVE, CacheChange("remove", [2, 3, 4, 5])), 1),
}
STORMS = ("orderly", "disorderly")
_BLOCKS = 20


def scenario(of: Subject, name: str) -> dict[str, int]:
    """Return whether the one answer is wrong, and how many events were not accepted."""
    of.fresh(1, _BLOCKS)
    found = SCENARIOS[name]
    steps = (_step(of, 0, each) for each in found.changes)
    errors = sum(not _accepted(of, step) for step in steps)
    wrong = of.depths(pack(range(1, _BLOCKS + 1))).get(0, 0) != found.depth
    return {"answers": 1, "wrong": int(wrong), "errors": errors}


def storm(of: Subject, seed: int, kind: str) -> dict[str, int]:
    """Return how many answers of how many differ from the truth, and how many events were not accepted."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    of.fresh(RANKS, CHAINS * DEPTH)
    chains = [numbers(chain(seed, number, DEPTH)) for number in range(CHAINS)]
    held: list[set[int]] = [set() for _ in range(RANKS)]
    errors = wrong = 0
    for _ in range(EVENTS):
        rank, blocks = draw.randrange(RANKS), draw.choice(chains)
        change = any_event(draw, blocks)
        if kind == "orderly":
            change = orderly_event(change, blocks, held[rank])
        (held[rank].update if change.kind == "store" else held[rank].difference_update)(change.blocks)
        errors += not _accepted(of, _step(of, rank, change))
        truth = {each: depth for each in range(RANKS) if (depth := _depth(blocks, held[each]))}
        wrong += of.depths(pack(blocks)) != truth
    return {"answers": EVENTS, "wrong": wrong, "errors": errors}


def any_event(draw: random.Random, blocks: Sequence[int]) -> CacheChange:
    """Return an event of some blocks of a chain: stored, or removed in any order."""
    first = draw.randrange(len(blocks))
    part = blocks[first : first + draw.randint(1, 8)]
    if draw.random() < 0.5:  # noqa: PLR2004 - as many stores as removals
        return _store(blocks, first, len(part))
    return CacheChange("remove", draw.sample(part, len(part)))


def orderly_event(change: CacheChange, blocks: Sequence[int], held: set[int]) -> CacheChange:
    """Return an event like `change` that an engine which holds `held` may send."""
    removed = [each for each in change.blocks if each in held]
    if change.kind == "remove" and removed:
        return CacheChange("remove", removed)
    if change.kind == "store" and (change.parent is None or change.parent in held):
        return change
    depth = _depth(blocks, held)
    return _store(blocks, depth if depth < len(blocks) else 0, len(change.blocks))


def _store(blocks: Sequence[int], first: int, count: int) -> CacheChange:
    return CacheChange("store", blocks[first : first + count], blocks[first - 1] if first else None)


def _depth(blocks: Sequence[int], held: set[int]) -> int:
    return next((depth for depth, each in enumerate(blocks) if each not in held), len(blocks))


def _step(of: Subject, rank: int, change: CacheChange) -> IndexCall:
    if change.kind == "remove":
        return of.remove(rank, pack(change.blocks))
    return of.store(ScheduledStore(rank, change.parent, 0 if change.parent is None else 1, pack(change.blocks)))


def _accepted(of: Subject, step: IndexCall) -> bool:
    """Return whether the index took an event; what it took of a refused one is its own affair."""
    (call,) = of.bind([step])
    try:
        refused: Any = call()
    except Exception:  # noqa: BLE001 - the peer's own kinds are not known here; it is counted
        return False
    return not refused
