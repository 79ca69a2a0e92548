"""Which pools are tried, and in which order.

    preference   the selected pool, then faster ones (a smaller priority number) from slow to fast, then the others
                 from fast to slow; ties by index
    order        fit pools by preference, then strained ones, then those that are down
    tried        the first only; with `enable_priority_retry` all of them, until one answers

So an unfit pool is skipped while a fit one is left, and is used as a last resort. Without retries only the selected
pool is tried, unless it is not fit: then only the first of the order.

Source: `docs/SOURCES.md` D5.3, which uses only the selected and faster pools, whatever their status.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from router.pools.probes import FITNESSES, Cause, Fitness, PoolStatus
from router.pools.selection import PoolGroup, Selection

Place = Literal["selected", "faster", "other"]


class PoolCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that may be tried, and its status."""

    pool: int
    namespace: str
    place: Place
    fitness: Fitness
    causes: tuple[Cause, ...] = ()
    reasons: tuple[str, ...] = ()


class PoolSequence(msgspec.Struct, frozen=True, kw_only=True):
    """The pools for one phase of a request: `order` is tried in turn; `passed_over` were preferred, but not fit."""

    selection: Selection
    order: tuple[PoolCandidate, ...]
    passed_over: tuple[PoolCandidate, ...]


def preference(selected: int, priorities: Sequence[int]) -> tuple[int, ...]:
    """Return all pools in the order of preference, the selected one first."""
    own = priorities[selected]
    others = [pool for pool in range(len(priorities)) if pool != selected]
    faster = sorted((pool for pool in others if priorities[pool] < own), key=lambda pool: (-priorities[pool], pool))
    rest = sorted((pool for pool in others if priorities[pool] >= own), key=lambda pool: (priorities[pool], pool))
    return (selected, *faster, *rest)


def plan(group: PoolGroup, selection: Selection, statuses: Sequence[PoolStatus], *, retry: bool) -> PoolSequence:
    """Return the pools in the order of trial; `statuses` are those of the group's pools, by index."""
    selected = selection.pool
    preferred = preference(selected, group.priorities)
    candidates = tuple(_candidate(group, selected, pool, statuses[pool]) for pool in preferred)
    order = sorted(candidates, key=lambda each: FITNESSES.index(each.fitness))
    return PoolSequence(
        selection=selection,
        order=tuple(order if retry else order[:1]),
        passed_over=candidates[: candidates.index(order[0])],
    )


def _candidate(group: PoolGroup, selected: int, pool: int, status: PoolStatus) -> PoolCandidate:
    place: Place = "selected" if pool == selected else "other"
    if group.priorities[pool] < group.priorities[selected]:
        place = "faster"
    return PoolCandidate(
        pool=pool,
        namespace=group.namespaces[pool],
        place=place,
        fitness=status.fitness,
        causes=status.causes,
        reasons=status.reasons,
    )
