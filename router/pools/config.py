"""The configuration of pools: NVIDIA Dynamo's complete JSON, and additional keys in its object `pools`.

    {"mode": "disagg",                              or "agg"; disagg without it
     "enable_priority_retry": false,
     "num_prefill_pools": 1, "prefill_pool_dynamo_namespaces": ["p"], "prefill_pool_priorities": [0],
     "prefill_pool_selection_strategy": {
         "isl_min": 0, "isl_max": 32000, "isl_resolution": 2,
         "ttft_min_ms": 10, "ttft_max_ms": 3000, "ttft_resolution": 2,
         "prefill_pool_mapping": [[0, 0], [0, 0]],  a row for each cell of isl, in it one for each of ttft
         "priority_overrides": [{"min_priority": 5, "max_priority": 10, "target_pool": 0}]},
     "num_decode_pools" ... "decode_pool_mapping":  likewise; axes context_length_*, itl_*
     "pools": {"namespaces": {"p": {"routers": [{"url": "http://10.0.0.1:8000", "control_url": "..."}]}}}}

    agg:  num_agg_pools, agg_pool_...; axes ttft_*, itl_*, and isl_* before them where all three of its keys are given

`targets.py` has the keys of `pools`.

`ttft_min`, `ttft_max`, `itl_min`, `itl_max` are read as `*_ms`, with a warning. Keys that are not known have no effect,
and are warned of; in `pools` and in overrides they are refused. Source: `docs/SOURCES.md` D5.1.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from router.pools.json_values import ConfigObject, PoolsConfigInvalid, Words, is_number
from router.pools.selection import Axis, AxisName, Override, PoolGroup, PoolPhase
from router.pools.selection import Mapping as PoolMapping
from router.pools.targets import Own, PoolSettings, read_own

POOLS_MAX = 256
RESOLUTION_MAX = 1024
_NUMBER_MAX = 1e12
_PRIORITY_MAX = 1 << 62
_MAPPING_KEYS: Mapping[PoolPhase, str] = {
    "prefill": "prefill_pool_mapping",
    "decode": "decode_pool_mapping",
    "agg": "agg_pool_mapping",
}
_AXES: Mapping[PoolPhase, tuple[AxisName, ...]] = {
    "prefill": ("isl", "ttft_ms"),
    "decode": ("context_length", "itl_ms"),
    "agg": ("ttft_ms", "itl_ms"),
}
_ISL_KEYS = ("isl_min", "isl_max", "isl_resolution")


class PoolsConfig(Own, frozen=True, kw_only=True):
    """The complete configuration. `groups`: prefill and decode, or agg; `pools` has all their namespaces."""

    mode: Literal["disagg", "agg"]
    retry: bool
    groups: tuple[PoolGroup, ...]
    warnings: tuple[str, ...] = ()


def read_config(data: Any, given: Mapping[str, PoolSettings] | None = None) -> PoolsConfig:  # noqa: ANN401 - any JSON
    """Return the configuration from a JSON value; `given` pools replace those of the configuration.

    Raises:
        PoolsConfigInvalid: with every problem found.
    """
    top = ConfigObject(data if isinstance(data, dict) else {}, "", [], [])
    if not isinstance(data, dict):
        raise PoolsConfigInvalid((f"found {type(data).__name__}, allowed an object",))
    mode = top.value("mode")
    if mode is None:
        mode = "disagg"
    elif mode not in ("disagg", "agg"):
        top.problem("mode", mode, "'disagg' or 'agg'")
        raise PoolsConfigInvalid(tuple(top.problems))
    phases: tuple[PoolPhase, ...] = ("prefill", "decode") if mode == "disagg" else ("agg",)
    retry = top.flag("enable_priority_retry", default=False)
    groups = tuple(_group(top, phase) for phase in phases)
    own = read_own(top, [name for group in groups for name in group.namespaces], given or {})
    top.warn_of_others()
    if top.problems:
        raise PoolsConfigInvalid(tuple(top.problems))
    return PoolsConfig(
        mode=mode, retry=retry, groups=groups, warnings=tuple(top.warnings), **msgspec.structs.asdict(own)
    )


def _group(top: ConfigObject, phase: PoolPhase) -> PoolGroup:
    count = top.integer(f"num_{phase}_pools", 1, POOLS_MAX)
    group = PoolGroup(
        phase=phase,
        namespaces=_namespaces(top, phase, count),
        priorities=_priorities(top, phase, count),
        axes=(),
        mapping=(),
    )
    strategy = top.within(f"{phase}_pool_selection_strategy")
    if strategy is None:
        return group
    problems_before = len(strategy.problems)
    axes = _axes(strategy, phase)
    mapping = _mapping(
        strategy, _MAPPING_KEYS[phase], axes if len(strategy.problems) == problems_before else None, count
    )
    group = replace(group, axes=axes, mapping=mapping, overrides=_overrides(strategy, count))
    strategy.warn_of_others()
    return group


def _namespaces(top: ConfigObject, phase: PoolPhase, count: int) -> tuple[str, ...]:
    key, allowed = f"{phase}_pool_dynamo_namespaces", f"a list of {count} names, as num_{phase}_pools says"
    found = top.items(key, allowed)
    if isinstance(top.value(key), list) and len(found) != count:
        top.problem(key, Words(f"{len(found)} names"), allowed)
    for index, name in enumerate(found):
        if not isinstance(name, str) or not name or not name.isprintable():  # heads have it
            top.problem(f"{key}[{index}]", name, "a name")
    return tuple(name if isinstance(name, str) else "" for name in found)


def _priorities(top: ConfigObject, phase: PoolPhase, count: int) -> tuple[int, ...]:
    key = f"{phase}_pool_priorities"
    if top.value(key) is None:
        return tuple(range(count))
    allowed = f"a list of {count} whole numbers, as num_{phase}_pools says"
    found = top.items(key, allowed)
    if isinstance(top.value(key), list) and len(found) != count:
        top.problem(key, Words(f"{len(found)} numbers"), allowed)
    for index, number in enumerate(found):
        if not is_number(number, integer=True):
            top.problem(f"{key}[{index}]", number, "a whole number")
    return tuple(found)


def _axes(strategy: ConfigObject, phase: PoolPhase) -> tuple[Axis, ...]:
    names = _AXES[phase]
    if phase == "agg" and _has_isl(strategy):
        names = ("isl", *names)
    return tuple(_axis(strategy, name) for name in names)


def _has_isl(strategy: ConfigObject) -> bool:
    given = [key for key in _ISL_KEYS if strategy.has(key)]
    missing = [key for key in _ISL_KEYS if key not in given]
    if given and missing:
        for key in missing:
            strategy.problem(key, None, f"a number: all three of {', '.join(_ISL_KEYS)}, or none")
    return bool(given) and not missing


def _axis(strategy: ConfigObject, name: AxisName) -> Axis:
    base = name.removesuffix("_ms")
    least_key, most_key = f"{base}_min", f"{base}_max"
    if name != base:
        least_key = strategy.renamed(f"{least_key}_ms", least_key)
        most_key = strategy.renamed(f"{most_key}_ms", most_key)
    problems_before = len(strategy.problems)
    read = strategy.number if name != base else strategy.integer
    least = read(least_key, -int(_NUMBER_MAX), int(_NUMBER_MAX))
    most = read(most_key, -int(_NUMBER_MAX), int(_NUMBER_MAX))
    if len(strategy.problems) == problems_before and least >= most:
        strategy.problem(least_key, least, f"less than {most_key}, which is {most:g}")
    resolution = strategy.integer(f"{base}_resolution", 1, RESOLUTION_MAX)
    return Axis(name, least, most, resolution)


def _mapping(strategy: ConfigObject, key: str, axes: tuple[Axis, ...] | None, count: int) -> PoolMapping:
    """Return the mapping; with invalid axes its shape is not checked."""
    found = strategy.value(key)
    if axes is not None:
        _check_mapping(strategy, strategy.at(key), found, axes, count)
    return _frozen(found) if isinstance(found, list) else ()


def _check_mapping(strategy: ConfigObject, path: str, found: object, axes: tuple[Axis, ...], count: int) -> None:
    if not axes:
        if not is_number(found, integer=True) or not 0 <= found < count:  # type: ignore[operator]  # a number
            strategy.problem_at(path, found, f"a pool's index, 0..{count - 1}")
        return
    axis, *rest = axes
    allowed = f"a list of {axis.resolution}, as {axis.name.removesuffix('_ms')}_resolution says"
    if not isinstance(found, list):
        strategy.problem_at(path, found, allowed)
    elif len(found) != axis.resolution:
        strategy.problem_at(path, Words(f"a list of {len(found)}"), allowed)
    else:
        for index, inner in enumerate(found):
            _check_mapping(strategy, f"{path}[{index}]", inner, tuple(rest), count)


def _frozen(found: list[Any]) -> PoolMapping:
    return tuple(_frozen(each) if isinstance(each, list) else each for each in found)


def _overrides(strategy: ConfigObject, count: int) -> tuple[Override, ...]:
    if strategy.value("priority_overrides") is None:
        return ()
    overrides = []
    for index, each in enumerate(strategy.items("priority_overrides", "a list of objects")):
        rule = strategy.inner(each, strategy.at(f"priority_overrides[{index}]"))
        if rule is not None:
            overrides.append(_override(rule, count))
    return tuple(overrides)


def _override(rule: ConfigObject, count: int) -> Override:
    problems_before = len(rule.problems)
    least = rule.integer("min_priority", -_PRIORITY_MAX, _PRIORITY_MAX)
    most = rule.integer("max_priority", -_PRIORITY_MAX, _PRIORITY_MAX)
    if len(rule.problems) == problems_before and least > most:
        rule.problem("min_priority", least, f"max_priority at most, which is {most}")
    target = rule.integer("target_pool", 0, count - 1)
    rule.refuse_others()
    return Override(least, most, target)
