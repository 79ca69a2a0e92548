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

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field, StrictBool, ValidationError, model_validator

from kv_protocol.errors import FOUND_CHARACTERS_MAX, shortened
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import Section
from kv_runtime.config.words import allowed
from router.pools.selection import Axis, AxisName, Override, PoolGroup, PoolPhase
from router.pools.selection import Mapping as PoolMapping
from router.pools.targets import Number, OwnSection, PoolSettings, Whole

_AXES: tuple[tuple[str, AxisName], ...] = (
    ("isl", "isl"), ("context_length", "context_length"), ("ttft", "ttft_ms"), ("itl", "itl_ms"),
)  # fmt: skip
"""How the keys of an axis begin, and its name; in the order of mappings."""
_ISL_KEYS = ("isl_min", "isl_max", "isl_resolution")

Count = Annotated[Whole, Field(ge=1, le=256)]
Names = tuple[Annotated[str, Field(min_length=1)], ...]
Tokens = Annotated[Whole, Field(ge=-(10**12), le=10**12)]
Milliseconds = Annotated[Number, Field(ge=-1e12, le=1e12)]
Cells = Annotated[Whole, Field(ge=1, le=1024)]
Priority = Annotated[Whole, Field(ge=-(1 << 62), le=1 << 62)]


class OverrideSection(Section):
    """A rule of priorities."""

    min_priority: Priority
    max_priority: Priority
    target_pool: Whole = Field(ge=0)


class _Strategy(Section):
    """A selection strategy; unknown keys are kept, to be warned of."""

    model_config = ConfigDict(extra="allow")

    priority_overrides: tuple[OverrideSection, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:  # noqa: ANN401 - any JSON
        """Take old names for new ones that are not given."""
        if not isinstance(given, dict):
            return given
        return {f"{key}_ms": value for key, value in given.items() if f"{key}_ms" in cls.model_fields} | given

    def warnings(self) -> Iterator[str]:
        for key in self.model_extra or ():
            is_old = f"{key}_ms" in type(self).model_fields
            yield f"{key} is deprecated: use {key}_ms" if is_old else f"{key} has no effect"

    def axes(self) -> tuple[Axis, ...]:
        return tuple(
            Axis(
                name,
                getattr(self, name.replace(key, f"{key}_min")),
                getattr(self, name.replace(key, f"{key}_max")),
                cells,
            )
            for key, name in _AXES
            if (cells := getattr(self, f"{key}_resolution", None))
        )


class _Ttft(_Strategy):
    ttft_min_ms: Milliseconds
    ttft_max_ms: Milliseconds
    ttft_resolution: Cells


class _Itl(_Strategy):
    itl_min_ms: Milliseconds
    itl_max_ms: Milliseconds
    itl_resolution: Cells


class PrefillStrategy(_Ttft):
    """Of prompts that are computed here and decoded elsewhere."""

    isl_min: Tokens
    isl_max: Tokens
    isl_resolution: Cells
    prefill_pool_mapping: list[Any]


class DecodeStrategy(_Itl):
    """Sequences that a decode worker answers; a prefill worker computed their prompts."""

    context_length_min: Tokens
    context_length_max: Tokens
    context_length_resolution: Cells
    decode_pool_mapping: list[Any]


class AggStrategy(_Ttft, _Itl):
    """Of whole requests."""

    isl_min: Tokens | None = None
    isl_max: Tokens | None = None
    isl_resolution: Cells | None = None
    agg_pool_mapping: list[Any]

    @model_validator(mode="after")
    def _length_is_whole(self) -> "AggStrategy":
        missing = [key for key in _ISL_KEYS if getattr(self, key) is None]
        if 0 < len(missing) < len(_ISL_KEYS):
            raise ValueError(f"{missing[0]}: found none, allowed all three of {', '.join(_ISL_KEYS)}, or none")
        return self


class _PoolsFile(Section):
    """The whole JSON. Unknown keys, those of the other mode among them, are kept, to be warned of."""

    model_config = ConfigDict(extra="allow")

    mode: Literal["disagg", "agg"] = "disagg"
    enable_priority_retry: StrictBool = False
    pools: OwnSection = OwnSection()


class _DisaggFile(_PoolsFile):
    num_prefill_pools: Count
    prefill_pool_dynamo_namespaces: Names = ()
    prefill_pool_priorities: tuple[Whole, ...] | None = None
    prefill_pool_selection_strategy: PrefillStrategy
    num_decode_pools: Count
    decode_pool_dynamo_namespaces: Names = ()
    decode_pool_priorities: tuple[Whole, ...] | None = None
    decode_pool_selection_strategy: DecodeStrategy


class _AggFile(_PoolsFile):
    num_agg_pools: Count
    agg_pool_dynamo_namespaces: Names = ()
    agg_pool_priorities: tuple[Whole, ...] | None = None
    agg_pool_selection_strategy: AggStrategy


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The complete configuration. `groups`: prefill and decode, or agg; `pools` has all their namespaces."""

    mode: Literal["disagg", "agg"]
    retry: bool
    groups: tuple[PoolGroup, ...]
    pools: dict[str, PoolSettings]
    look_period_s: float
    look_timeout_s: float
    characters_per_token: float
    warnings: tuple[str, ...] = ()


def read_config(data: Any, given: Mapping[str, PoolSettings] | None = None) -> PoolsConfig:  # noqa: ANN401 - any JSON
    """Return the configuration from a JSON value; `given` pools replace those of the configuration.

    Raises:
        ConfigurationError: with every problem found.
    """
    kind: type[_PoolsFile] = _AggFile if isinstance(data, dict) and data.get("mode") == "agg" else _DisaggFile
    try:
        read = kind.model_validate(_without_nulls(data))
    except ValidationError as error:
        raise ConfigurationError([_problem(found) for found in error.errors()]) from error
    phases: tuple[PoolPhase, ...] = ("prefill", "decode") if read.mode == "disagg" else ("agg",)
    problems, warnings = list[str](), list[str]()
    groups = [_group(read, phase, problems, warnings) for phase in phases]
    pools = read.pools.settings([name for group in groups for name in group.namespaces], given or {}, problems)
    if problems:
        raise ConfigurationError(problems)
    return PoolsConfig(
        mode=read.mode,
        retry=read.enable_priority_retry,
        groups=tuple(groups),
        pools=pools,
        look_period_s=read.pools.look_period_s,
        look_timeout_s=read.pools.look_timeout_s,
        characters_per_token=read.pools.characters_per_token,
        warnings=(*warnings, *(f"{key} has no effect" for key in read.model_extra or ())),
    )


def _problem(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, which it does not export
    """Return one line: the path, what was found, what is allowed."""
    path, found = ".".join(map(str, error["loc"])) or "the configuration", repr(error["input"])
    is_object = error["type"] == "value_error" and isinstance(error["input"], dict)  # the words say what of it
    is_hidden = len(found) > FOUND_CHARACTERS_MAX or "@" in found  # perhaps a password
    if error["type"] in ("missing", "extra_forbidden") or is_object or is_hidden:
        return f"{path}: {allowed(error)}"
    return f"{path}: found {found}, {allowed(error)}"


def _without_nulls(found: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the value without keys that have none: they are as if they were not given."""
    if isinstance(found, dict):
        return {key: _without_nulls(each) for key, each in found.items() if each is not None}
    return [_without_nulls(each) for each in found] if isinstance(found, list) else found


def _group(read: _PoolsFile, phase: PoolPhase, problems: list[str], warnings: list[str]) -> PoolGroup:
    """Return the pools of a phase; add what does not fit to `problems`."""
    key = f"{phase}_pool_selection_strategy"
    count, strategy = getattr(read, f"num_{phase}_pools"), getattr(read, key)
    namespaces, priorities = (getattr(read, f"{phase}_pool_{what}") for what in ("dynamo_namespaces", "priorities"))
    if priorities is None:
        priorities = tuple(range(count))
    for what, found in (("dynamo_namespaces", namespaces), ("priorities", priorities)):
        if len(found) != count:
            problems.append(f"{phase}_pool_{what}: found {len(found)}, allowed {count}, as num_{phase}_pools says")
    mapping, axes = f"{phase}_pool_mapping", strategy.axes()
    found = list(_misfits(getattr(strategy, mapping), mapping, axes, count))
    for axis in axes:
        if axis.least >= axis.most:
            base, unit, _ = axis.name.partition("_ms")
            words = f"allowed less than {base}_max{unit}, which is {axis.most:g}"
            found.append(f"{base}_min{unit}: found {axis.least:g}, {words}")
    for at, rule in enumerate(strategy.priority_overrides):
        if rule.min_priority > rule.max_priority or rule.target_pool >= count:
            found.append(f"priority_overrides.{at}: found {rule}, allowed min <= max, pool 0..{count - 1}")
    problems += [f"{key}.{each}" for each in found]
    warnings += [f"{key}.{each}" for each in strategy.warnings()]
    overrides = tuple(Override(**rule.model_dump()) for rule in strategy.priority_overrides)
    return PoolGroup(
        phase=phase,
        namespaces=namespaces,
        priorities=priorities,
        axes=axes,
        mapping=_frozen(getattr(strategy, mapping)),
        overrides=overrides,
    )


def _misfits(found: object, path: str, axes: tuple[Axis, ...], count: int) -> Iterator[str]:
    """Yield the parts of a mapping that are no list of an axis's length, or no index of a pool."""
    if not axes:
        if type(found) is not int or not 0 <= found < count:
            yield f"{path}: found {shortened(repr(found))}, allowed a pool's index, 0..{count - 1}"
    elif not isinstance(found, list) or len(found) != axes[0].resolution:
        shown = f"a list of {len(found)}" if isinstance(found, list) else shortened(repr(found))
        resolution = f"{axes[0].name.removesuffix('_ms')}_resolution"
        yield f"{path}: found {shown}, allowed a list of {axes[0].resolution}, as {resolution} says"
    else:
        for at, inner in enumerate(found):
            yield from _misfits(inner, f"{path}.{at}", axes[1:], count)


def _frozen(found: list[Any]) -> PoolMapping:
    return tuple(_frozen(each) if isinstance(each, list) else each for each in found)
