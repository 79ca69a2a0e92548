"""The configuration of pools: NVIDIA Dynamo's complete JSON, and additional keys in its object `pools`.

    {"mode": "disagg",                              or "agg"; disagg if it is missing
     "enable_priority_retry": false,
     "num_prefill_pools": 1, "prefill_pool_dynamo_namespaces": ["p"], "prefill_pool_priorities": [0],
     "prefill_pool_selection_strategy": {
         "isl_min": 0, "isl_max": 32000, "isl_resolution": 2,
         "ttft_min_ms": 10, "ttft_max_ms": 3000, "ttft_resolution": 2,
         "prefill_pool_mapping": [[0, 0], [0, 0]],  a row for each cell of isl, with a pool for each of ttft
         "priority_overrides": [{"min_priority": 5, "max_priority": 10, "target_pool": 0}]},
     "num_decode_pools" ... "decode_pool_mapping":  likewise; axes context_length_*, itl_*
     "pools": {"namespaces": {"p": {"routers": [{"url": "http://10.0.0.1:8000", "control_url": "..."}]}}}}

    agg:  num_agg_pools, agg_pool_...; axes ttft_*, itl_*, and isl_* before them if all three of its keys are given

docs/POOLS.md says what the keys of `pools` mean; fields of `LiveLimits` there are for all pools, in a namespace for
that pool. `ttft_min`, `ttft_max`, `itl_min`, `itl_max` are read as `*_ms`, with a warning. Unknown keys have no effect,
and cause a warning; in `pools` and in overrides they are refused. Source: `docs/SOURCES.md` D5.1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, ConfigDict, Field, StrictBool, ValidationError, create_model, model_validator

from kv_protocol.errors import FOUND_CHARACTERS_MAX, shortened
from kv_protocol.fleet import is_base_url
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import Section
from kv_runtime.config.words import allowed

PoolPhase = Literal["prefill", "decode", "agg"]
AxisName = Literal["isl", "context_length", "ttft_ms", "itl_ms"]
Target = Literal["ttft", "itl"]
TOKEN_AXES: frozenset[AxisName] = frozenset({"isl", "context_length"})
_AXES: dict[PoolPhase, tuple[AxisName, ...]] = {
    "prefill": ("isl", "ttft_ms"), "decode": ("context_length", "itl_ms"), "agg": ("isl", "ttft_ms", "itl_ms")
}  # fmt: skip
"""The axes of each phase's grid, in the order in which its mapping is nested."""


def _keys(axis: AxisName) -> tuple[str, str, str]:
    """Return the keys of an axis: least, most, resolution."""
    base, unit, _ = axis.partition("_ms")
    return f"{base}_min{unit}", f"{base}_max{unit}", f"{base}_resolution"


_ISL_KEYS = _keys("isl")

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
"""A JSON number: neither text nor `true` is taken for one."""
Count = Annotated[Whole, Field(ge=1, le=256)]
Names = tuple[Annotated[str, Field(min_length=1)], ...]
Tokens = Annotated[Whole, Field(ge=-(10**12), le=10**12)]
Milliseconds = Annotated[Number, Field(ge=-1e12, le=1e12)]
Cells = Annotated[Whole, Field(ge=1, le=1024)]
Priority = Annotated[Whole, Field(ge=-(1 << 62), le=1 << 62)]
_UNBOUNDED = AfterValidator(lambda found: found or None)
QueueBound = Annotated[Annotated[Whole, Field(ge=0, le=1 << 30)] | None, _UNBOUNDED]
LatencyBound = Annotated[Annotated[Number, Field(ge=0, le=3.6e6)] | None, _UNBOUNDED]


def _address(found: str) -> str:
    if not is_base_url(found):
        raise ValueError("allowed http(s)://host:port")
    return found.rstrip("/")


class RouterAddress(Section):
    """The address of a pool's router: its data plane, and its control plane (empty: not probed)."""

    url: Annotated[str, AfterValidator(_address)]
    control_url: Annotated[str, AfterValidator(lambda found: found and _address(found))] = ""


class LiveLimits(Section):
    """Limits that decide when a pool stops being fit, and when it is fit again. A bound of 0 is None: not checked."""

    failures_max: Whole = Field(2, ge=1, le=100)
    successes_min: Whole = Field(2, ge=1, le=100)
    queue_requests_max: QueueBound = 64
    ttft_bound_ms: LatencyBound = None
    itl_bound_ms: LatencyBound = None
    attainment_min_ratio: Number = Field(0.9, ge=0, le=1)
    window_requests_min: Whole = Field(20, ge=1, le=1_000_000)
    hold_s: Number = Field(30.0, ge=0.1, le=86_400)

    @property
    def bounds_ms(self) -> dict[Target, float]:
        """The bounds that are checked: for an answer's beginning, and for the time between its tokens."""
        bounds: dict[Target, float | None] = {"ttft": self.ttft_bound_ms, "itl": self.itl_bound_ms}
        return {target: bound for target, bound in bounds.items() if bound is not None}


class PoolSettings(LiveLimits):
    """A pool's limits, and its routers, or the file of a router of this process; neither: it has no router yet."""

    routers: tuple[RouterAddress, ...] = Field((), max_length=16)
    config: str = ""

    @model_validator(mode="after")
    def _is_in_one_place(self) -> "PoolSettings":
        if self.routers and self.config:
            raise ValueError("allowed either routers or config")
        urls = {each.url for each in self.routers}
        if len(urls) < max(len(self.routers), "routers" in self.model_fields_set):
            raise ValueError("routers: allowed 1 or more, each url once")
        return self


class PoolsSection(LiveLimits):
    """The object `pools`."""

    namespaces: dict[str, PoolSettings] = Field({})
    look_period_s: Number = Field(1.0, ge=0.01, le=3600)
    look_timeout_s: Number = Field(2.0, ge=0.01, le=60)
    characters_per_token: Number = Field(4.0, ge=0.1, le=100)

    def settings(
        self, names: Sequence[str], given: Mapping[str, PoolSettings], problems: list[str]
    ) -> dict[str, PoolSettings]:
        """Return the pools of these names. A `given` pool replaces the configured one, except its limits."""
        pools, allowed = dict[str, PoolSettings](), ", ".join(dict.fromkeys(names))
        others = sorted({*self.namespaces, *given} - {*names})
        problems += [
            f"pools.namespaces.{each}: found {each!r}, allowed a pool's namespace: {allowed}" for each in others
        ]
        for name in names:
            own = self.namespaces.get(name, PoolSettings())
            common = {limit: getattr(self, limit) for limit in LiveLimits.model_fields.keys() - own.model_fields_set}
            place = given.get(name, own)
            pools[name] = own.model_copy(update={**common, "routers": place.routers, "config": place.config})
        return pools


class Override(Section):
    """Requests of these priorities, both ends included, go to `target_pool`, whatever the grid says."""

    min_priority: Priority
    max_priority: Priority
    target_pool: Whole = Field(ge=0)


PoolMapping = Sequence["int | PoolMapping"]
"""Pool indices, nested as deep as there are axes."""


class Axis(msgspec.Struct, frozen=True):
    """One dimension of a grid, in tokens or milliseconds: `least` < `most`, `resolution` cells."""

    name: AxisName
    least: float
    most: float
    resolution: int

    @property
    def step(self) -> float:
        """The width of a cell."""
        return (self.most - self.least) / self.resolution

    @property
    def midpoint(self) -> float:
        """The value that replaces an absent one."""
        total = self.least + self.most
        return total // 2 if self.name in TOKEN_AXES else total / 2


class PoolGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one phase, by index: namespaces, priorities (smaller is faster), and the rules of selection."""

    phase: PoolPhase
    namespaces: tuple[str, ...]
    priorities: tuple[int, ...]
    axes: tuple[Axis, ...]
    mapping: PoolMapping
    overrides: tuple[Override, ...] = ()


class _Strategy(Section):
    """A selection strategy. Unknown keys are kept for warnings."""

    model_config = ConfigDict(extra="allow")

    priority_overrides: tuple[Override, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:  # noqa: ANN401 - any JSON
        """Read old names as the new ones; if both are given, only the new one counts."""
        if not isinstance(given, dict):
            return given
        return {f"{key}_ms": value for key, value in given.items() if f"{key}_ms" in cls.model_fields} | given

    def warnings(self) -> Iterator[str]:
        for key in self.model_extra or ():
            is_old = f"{key}_ms" in type(self).model_fields
            yield f"{key} is deprecated: use {key}_ms" if is_old else f"{key} has no effect"

    @model_validator(mode="after")
    def _length_is_whole(self) -> "_Strategy":
        missing = [key for key in _ISL_KEYS if getattr(self, key, 0) is None]
        if 0 < len(missing) < len(_ISL_KEYS):
            raise ValueError(f"{missing[0]}: found none, allowed all three of {', '.join(_ISL_KEYS)}, or none")
        return self

    def axes(self, phase: PoolPhase) -> tuple[Axis, ...]:
        found = ((name, [getattr(self, key) for key in _keys(name)]) for name in _AXES[phase])
        return tuple(Axis(name, least, most, cells) for name, (least, most, cells) in found if cells)


def _strategy_of(phase: PoolPhase) -> type[_Strategy]:
    fields: dict[str, Any] = {f"{phase}_pool_mapping": (list[Any], ...)}
    for axis in _AXES[phase]:
        kind = Tokens if axis in TOKEN_AXES else Milliseconds
        for key, each in zip(_keys(axis), (kind, kind, Cells), strict=True):
            fields[key] = (each | None, None) if (phase, axis) == ("agg", "isl") else (each, ...)
    return create_model(f"{phase}_strategy", __base__=_Strategy, **fields)


class _PoolsFile(Section):
    """The whole JSON. Unknown keys, and the keys of the other mode, are kept for warnings."""

    model_config = ConfigDict(extra="allow")

    mode: Literal["disagg", "agg"] = "disagg"
    enable_priority_retry: StrictBool = False
    pools: PoolsSection = PoolsSection()


def _file_of(*phases: PoolPhase) -> type[_PoolsFile]:
    fields: dict[str, Any] = {}
    for phase in phases:
        fields[f"num_{phase}_pools"] = Count, ...
        fields[f"{phase}_pool_dynamo_namespaces"] = Names, ()
        fields[f"{phase}_pool_priorities"] = tuple[Whole, ...] | None, None
        fields[f"{phase}_pool_selection_strategy"] = _strategy_of(phase), ...
    return create_model("_".join(phases), __base__=_PoolsFile, **fields)


_PHASES: dict[str, tuple[PoolPhase, ...]] = {"disagg": ("prefill", "decode"), "agg": ("agg",)}
_FILES = {mode: _file_of(*phases) for mode, phases in _PHASES.items()}


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The complete configuration. `groups`: prefill and decode, or agg; `pools` has all their namespaces.

    `own` is the object `pools` of the JSON.
    """

    mode: Literal["disagg", "agg"]
    retry: bool
    groups: tuple[PoolGroup, ...]
    pools: dict[str, PoolSettings]
    own: PoolsSection
    warnings: tuple[str, ...] = ()


def read_config(data: Any, given: Mapping[str, PoolSettings] | None = None) -> PoolsConfig:  # noqa: ANN401 - any JSON
    """Return the configuration from a JSON value. A `given` pool replaces the configured one, except its limits.

    Raises:
        ConfigurationError: with every problem found.
    """
    is_agg = isinstance(data, dict) and data.get("mode") == "agg"
    try:
        read = _FILES["agg" if is_agg else "disagg"].model_validate(_without_nulls(data))
    except ValidationError as error:
        raise ConfigurationError([_problem(found) for found in error.errors()]) from error
    problems, warnings = list[str](), list[str]()
    groups = [_group(read, phase, problems, warnings) for phase in _PHASES[read.mode]]
    pools = read.pools.settings([name for group in groups for name in group.namespaces], given or {}, problems)
    if problems:
        raise ConfigurationError(problems)
    return PoolsConfig(
        mode=read.mode,
        retry=read.enable_priority_retry,
        groups=tuple(groups),
        pools=pools,
        own=read.pools,
        warnings=(*warnings, *(f"{key} has no effect" for key in read.model_extra or ())),
    )


def _problem(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, which it does not export
    """Return one line: the path, what was found, what is allowed."""
    path, found = ".".join(map(str, error["loc"])) or "the configuration", repr(error["input"])
    is_object = error["type"] == "value_error" and isinstance(error["input"], dict)  # the message names the part
    is_hidden = len(found) > FOUND_CHARACTERS_MAX or "@" in found  # perhaps a password
    if error["type"] in ("missing", "extra_forbidden") or is_object or is_hidden:
        return f"{path}: {allowed(error)}"
    return f"{path}: found {found}, {allowed(error)}"


def _without_nulls(found: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the value without keys that are null: they count as not given."""
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
    mapping, axes = f"{phase}_pool_mapping", strategy.axes(phase)
    found = list(_misfits(getattr(strategy, mapping), mapping, axes, count))
    for axis in axes:
        if axis.least >= axis.most:
            least, most, _ = _keys(axis.name)
            found.append(f"{least}: found {axis.least:g}, allowed less than {most}, which is {axis.most:g}")
    for at, rule in enumerate(strategy.priority_overrides):
        if rule.min_priority > rule.max_priority or rule.target_pool >= count:
            found.append(f"priority_overrides.{at}: found {rule}, allowed min <= max, pool 0..{count - 1}")
    problems += [f"{key}.{each}" for each in found]
    warnings += [f"{key}.{each}" for each in strategy.warnings()]
    return PoolGroup(
        phase=phase,
        namespaces=namespaces,
        priorities=priorities,
        axes=axes,
        mapping=getattr(strategy, mapping),
        overrides=strategy.priority_overrides,
    )


def _misfits(found: object, path: str, axes: tuple[Axis, ...], count: int) -> Iterator[str]:
    """Yield the parts of a mapping that are no list of an axis's length, or no index of a pool."""
    if not axes:
        if type(found) is not int or not 0 <= found < count:
            yield f"{path}: found {shortened(repr(found))}, allowed a pool's index, 0..{count - 1}"
    elif not isinstance(found, list) or len(found) != axes[0].resolution:
        shown = f"a list of {len(found)}" if isinstance(found, list) else shortened(repr(found))
        yield f"{path}: found {shown}, allowed a list of {axes[0].resolution}, as {_keys(axes[0].name)[2]} says"
    else:
        for at, inner in enumerate(found):
            yield from _misfits(inner, f"{path}.{at}", axes[1:], count)
