"""Selects the pool of a request: a cell of a grid, unless a priority rule overrides it. Pure.

    step  = (most - least) / resolution                        of an axis
    index = clamp(int((x - least) / step), 0, resolution - 1)  `int` cuts toward 0; `most` is in the last cell
    x     = the request's value, else the process's default, else
            milliseconds  (least + most) / 2                   a 0 that is given counts as given
            tokens        (least + most) // 2
    pool  = mapping[index of each axis, in their order]
    pool  = the target of the first override with min_priority <= priority <= max_priority, if a priority is given

Which pools are then tried, and in which order:

    preference   the selected pool, then faster ones (a smaller priority number) from slow to fast, then the others
                 from fast to slow; ties by index
    order        fit pools by preference, then strained ones, then those that are down
    tried        the first of the order; with `enable_priority_retry` all of it in turn, until a pool answers

So an unfit pool is skipped while a fit one is left, and is used as a last resort. Without retries only the selected
pool is tried, unless it is not fit: then only the first of the order. Dynamo (D5.3) uses only the selected and faster
pools, whatever their status.

Source: `docs/SOURCES.md` D5.2 and D5.3; ai-dynamo/dynamo, `components/src/dynamo/global_router/pool_selection.py`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from router.pools.config import TOKEN_AXES, Axis, AxisName, PoolGroup, PoolPhase
from router.pools.state import FITNESSES, Cause, Fitness, PoolStatus

Place = Literal["selected", "faster", "other"]
Origin = Literal["request", "default", "midpoint"]


class Targets(msgspec.Struct, frozen=True):
    """Latency targets in milliseconds; None: not stated."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


class SelectionInput(msgspec.Struct, frozen=True):
    """What selection reads of a request; None: not stated, or unknown."""

    isl_tokens: int | None = None
    targets: Targets = Targets()
    priority: int | None = None


class Coordinate(msgspec.Struct, frozen=True):
    """A request's position on an axis. `clamped`: it is outside the axis, and counts into the first or last cell."""

    axis: AxisName
    value: float
    origin: Origin
    index: int
    clamped: bool


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The selected pool of one phase, and why. `override`: index of the rule that matched; None: the grid chose it."""

    phase: PoolPhase
    pool: int
    namespace: str
    coordinates: tuple[Coordinate, ...]
    grid_pool: int
    priority: int | None
    override: int | None


def select(group: PoolGroup, asked: SelectionInput, defaults: Targets) -> Selection:
    """Return the pool of `group` for the request, and why it is this one."""
    coordinates = tuple(_coordinate(axis, asked, defaults) for axis in group.axes)
    grid_pool: Any = group.mapping  # nested as deep as there are axes: validated
    for each in coordinates:
        grid_pool = grid_pool[each.index]
    priority, override, pool = asked.priority, None, int(grid_pool)
    if priority is not None:
        matching = (at for at, rule in enumerate(group.overrides) if rule.min_priority <= priority <= rule.max_priority)
        override = next(matching, None)
    if override is not None:
        pool = group.overrides[override].target_pool
    return Selection(
        phase=group.phase,
        pool=pool,
        namespace=group.namespaces[pool],
        coordinates=coordinates,
        grid_pool=grid_pool,
        priority=priority,
        override=override,
    )


def _coordinate(axis: Axis, asked: SelectionInput, defaults: Targets) -> Coordinate:
    if axis.name in TOKEN_AXES:
        given, default = asked.isl_tokens, None
    else:
        given, default = getattr(asked.targets, axis.name), getattr(defaults, axis.name)
    choices: tuple[tuple[float | None, Origin], ...] = (given, "request"), (default, "default")
    value, origin = next(((each, of) for each, of in choices if each is not None), (axis.midpoint, "midpoint"))
    last = axis.resolution - 1
    raw = int((value - axis.least) / axis.step)
    return Coordinate(axis.name, value, origin, max(0, min(raw, last)), value < axis.least or raw > last)


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


def preference(selected: int, priorities: Sequence[int]) -> dict[int, Place]:
    """Return all pools in the order of preference, the selected one first, and the place of each."""
    own = priorities[selected]
    pools: list[int] = sorted(range(len(priorities)), key=lambda pool: abs(priorities[pool] - own))
    faster: dict[int, Place] = {pool: "faster" for pool in pools if priorities[pool] < own}
    return {selected: "selected", **faster, **{pool: "other" for pool in pools if pool not in (selected, *faster)}}


def plan(group: PoolGroup, selection: Selection, statuses: Sequence[PoolStatus], *, retry: bool) -> PoolSequence:
    """Return the pools in the order of trial; `statuses` are those of the group's pools, by index."""
    candidates = tuple(
        PoolCandidate(
            pool=pool,
            namespace=group.namespaces[pool],
            place=place,
            fitness=statuses[pool].fitness,
            causes=statuses[pool].causes,
            reasons=statuses[pool].reasons,
        )
        for pool, place in preference(selection.pool, group.priorities).items()
    )
    order = sorted(candidates, key=lambda each: FITNESSES.index(each.fitness))
    return PoolSequence(
        selection=selection,
        order=tuple(order if retry else order[:1]),
        passed_over=candidates[: candidates.index(order[0])],
    )
