"""Which pool a request is for: equal to the formula, written out once more here, on 10,000 random requests."""

import random
from collections import Counter
from typing import Any

from router.pools.config import Axis, Override, PoolGroup
from router.pools.selection import Coordinate, Selection, SelectionInput, Targets, select

PREFILL = PoolGroup(
    phase="prefill",
    namespaces=("fast", "slow"),
    priorities=(0, 1),
    axes=(Axis("isl", 0, 32_000, 2), Axis("ttft_ms", 10.0, 3000.0, 2)),
    mapping=((0, 1), (0, 1)),
    overrides=(
        Override(min_priority=5, max_priority=10, target_pool=0),
        Override(min_priority=10, max_priority=20, target_pool=1),
    ),
)
NO_DEFAULTS = Targets()


def literal(group: PoolGroup, asked: SelectionInput, defaults: Targets) -> tuple[int, list[int]]:
    """Return pool and indices as section 5.2 of the reference says it, word by word."""
    given: dict[str, Any] = {
        "isl": (asked.isl_tokens, None),
        "context_length": (asked.isl_tokens, None),
        "ttft_ms": (asked.targets.ttft_ms, defaults.ttft_ms),
        "itl_ms": (asked.targets.itl_ms, defaults.itl_ms),
    }
    found: Any = group.mapping
    indices = []
    for axis in group.axes:
        from_request, from_process = given[axis.name]
        x = from_request
        if x is None:
            x = from_process
        if x is None and axis.name.endswith("_ms"):
            x = (axis.least + axis.most) / 2
        if x is None:
            x = (axis.least + axis.most) // 2
        step = (axis.most - axis.least) / axis.resolution
        index = int((x - axis.least) / step)
        index = max(index, 0)
        index = min(index, axis.resolution - 1)
        indices.append(index)
        found = found[index]
    if asked.priority is not None:
        for rule in group.overrides:
            if asked.priority >= rule.min_priority and asked.priority <= rule.max_priority:
                return rule.target_pool, indices
    return found, indices


def drawn_axis(draw: random.Random, name: Any) -> Axis:
    whole = not name.endswith("_ms")
    least = draw.choice([0, 10, -5, draw.randint(0, 1000)]) if whole else draw.choice([0.0, 10.0, draw.random() * 500])
    width = draw.randint(1, 40_000) if whole else draw.random() * 3000 + 1e-3
    return Axis(name, least, least + width, draw.randint(1, 9))


def drawn_mapping(draw: random.Random, axes: tuple[Axis, ...], pools: int) -> Any:
    if not axes:
        return draw.randrange(pools)
    return tuple(drawn_mapping(draw, axes[1:], pools) for _ in range(axes[0].resolution))


def drawn_value(draw: random.Random, axis: Axis) -> float | None:
    """Return bounds, cells' edges and what is beyond them as often as anything else."""
    step, whole = axis.step, not axis.name.endswith("_ms")
    found = draw.choice(
        [
            None, 0, axis.least, axis.most, axis.least - 1, axis.most + 1, axis.least - step, axis.most - step,
            axis.least + draw.randint(0, axis.resolution) * step, axis.least + draw.random() * (axis.most - axis.least),
        ]
    )  # fmt: skip
    return found if found is None or not whole else int(found)


def drawn_group(draw: random.Random) -> PoolGroup:
    phase, names = draw.choice(
        [
            ("prefill", ("isl", "ttft_ms")),
            ("decode", ("context_length", "itl_ms")),
            ("agg", ("ttft_ms", "itl_ms")),
            ("agg", ("isl", "ttft_ms", "itl_ms")),
        ]
    )
    pools = draw.randint(1, 5)
    axes = tuple(drawn_axis(draw, name) for name in names)
    rules = [(draw.randint(-3, 5), draw.randint(0, 6), draw.randrange(pools)) for _ in range(draw.randint(0, 3))]
    return PoolGroup(
        phase=phase,  # type: ignore[arg-type]  # drawn
        namespaces=tuple(f"pool-{each}" for each in range(pools)),
        priorities=tuple(range(pools)),
        axes=axes,
        mapping=drawn_mapping(draw, axes, pools),
        overrides=tuple(
            Override(min_priority=least, max_priority=least + more, target_pool=target) for least, more, target in rules
        ),
    )


def drawn_request(draw: random.Random, group: PoolGroup) -> tuple[SelectionInput, Targets]:
    values = {axis.name: drawn_value(draw, axis) for axis in group.axes}
    isl = values.get("isl", values.get("context_length"))
    targets = Targets(values.get("ttft_ms"), values.get("itl_ms"))
    defaults = Targets(draw.choice([None, draw.random() * 3000]), draw.choice([None, draw.random() * 500]))
    asked = SelectionInput(None if isl is None else int(isl), targets, draw.choice([None, draw.randint(-4, 12)]))
    return asked, defaults


def test_ten_thousand_random_requests_go_where_the_formula_says() -> None:
    draw = random.Random(8)
    reached, counts = set[tuple[Any, ...]](), Counter[str]()
    for number in range(10_000):
        group = drawn_group(draw)
        asked, defaults = drawn_request(draw, group)
        found = select(group, asked, defaults)
        expected, indices = literal(group, asked, defaults)
        assert found.pool == expected, (number, group, asked, defaults)
        assert [each.index for each in found.coordinates] == indices, (number, group, asked, defaults)
        assert found.namespace == group.namespaces[expected]
        reached.add((found.phase, len(group.axes), *(each.origin for each in found.coordinates)))
        counts["overridden"] += found.override is not None
        counts["clamped"] += any(each.clamped for each in found.coordinates)
    assert len(reached) >= 30, "every phase, with values of every origin"
    assert counts["overridden"] > 1000
    assert counts["clamped"] > 1000


def test_an_absent_target_is_the_processs_or_the_middle_and_an_explicit_0_is_neither() -> None:
    middle = select(PREFILL, SelectionInput(100), NO_DEFAULTS).coordinates[1]
    assert middle == Coordinate("ttft_ms", 1505.0, "midpoint", 1, clamped=False)
    default = select(PREFILL, SelectionInput(100), Targets(ttft_ms=20.0)).coordinates[1]
    assert default == Coordinate("ttft_ms", 20.0, "default", 0, clamped=False)
    zero = select(PREFILL, SelectionInput(100, Targets(ttft_ms=0.0)), Targets(ttft_ms=2000.0)).coordinates[1]
    assert zero == Coordinate("ttft_ms", 0.0, "request", 0, clamped=True)


def test_an_absent_length_is_the_whole_middle() -> None:
    group = PoolGroup(
        phase="agg", namespaces=("a",), priorities=(0,), axes=(Axis("isl", 1, 4, 1), Axis("ttft_ms", 1, 4, 1)),
        mapping=((0,),),
    )  # fmt: skip
    assert [each.value for each in select(group, SelectionInput(), NO_DEFAULTS).coordinates] == [2, 2.5]


def test_the_first_override_that_matches_wins_after_the_grid_and_none_without_a_priority() -> None:
    slow = SelectionInput(0, Targets(ttft_ms=2000.0))
    assert select(PREFILL, slow, NO_DEFAULTS) == Selection(
        phase="prefill",
        pool=1,
        namespace="slow",
        coordinates=(
            Coordinate("isl", 0, "request", 0, clamped=False),
            Coordinate("ttft_ms", 2000.0, "request", 1, clamped=False),
        ),
        grid_pool=1,
        priority=None,
        override=None,
    )
    by_priority = {
        priority: select(PREFILL, SelectionInput(0, slow.targets, priority), NO_DEFAULTS) for priority in range(4, 22)
    }
    assert [p for p, found in by_priority.items() if found.override == 0] == [5, 6, 7, 8, 9, 10]
    assert [p for p, found in by_priority.items() if found.override == 1] == list(range(11, 21))
    assert {found.grid_pool for found in by_priority.values()} == {1}
    assert (by_priority[7].pool, by_priority[4].pool) == (0, 1)
