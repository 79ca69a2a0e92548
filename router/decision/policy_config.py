"""The configuration of routing policy, and of prefill / decode disaggregation.

a user's mode     `package.module:function`, in `policy.user_modes`; nothing else is ever imported
the function      pure, `(candidates, request, policy, seed)` by position (`router/decision/policies.py`)
it returns        a `Choice`, or the index of a candidate
what it reads     what its attributes reads_overlap, reads_load (both True if missing) and reads_rates (False) say
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from kv_protocol.errors import shortened
from kv_protocol.openai.errors import as_json
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import Section
from kv_runtime.config.words import allowed
from router.decision.policies import MODES, Mode
from router.decision.policy import Affinity, CostParameters, PhaseOverrides, Policy, Unmet
from router.decision.state import AffinityLimits, ApproximateLimits

ConditionalPolicy = Literal["off", "isl_bounding", "prefill_load", "isl_or_load"]
_Limits = TypeVar("_Limits")
_POLICY, _COST = Policy(), CostParameters()
_AFFINITY, _APPROXIMATE = AffinityLimits(), ApproximateLimits()
_OF_A_PHASE = "fields of this section that differ for"
_ARGUMENTS_OF_A_MODE = 4
_PHASE_FIELDS = f"they are {', '.join(PhaseOverrides.__struct_fields__)}"


def picked(section: Section, kind: Callable[..., _Limits], **own: object) -> _Limits:
    """Return a `kind` made of `own` and of the section's fields that it has parameters for; the rest are defaults."""
    names = type(section).model_fields.keys() & signature(kind).parameters.keys()
    return kind(**{name: getattr(section, name) for name in names} | own)


def refused(error: Mapping[str, Any], section: str = "") -> str:
    """Return what is wrong with a field, by one of pydantic's errors; `section` stands before the field's name."""
    return f"{section}{field_of(error)}: found {as_json(error['input'])}, {allowed(error)}"


def field_of(error: Mapping[str, Any]) -> str:
    """Return the path of the field, without that of its section."""
    return ".".join(shortened(str(part)) for part in error["loc"])


class PolicySection(Section):
    """How a worker rank is chosen; formulas in `tests/reference/time_cost.py`."""

    user_modes: tuple[str, ...] = Field(
        (), max_length=64, description="functions that can be modes, each `package.module:function`; they are imported"
    )
    mode: str = Field(
        _POLICY.mode,
        description="kv, predicted-ttft, round-robin, random, power-of-two, least-loaded, direct, or one of user_modes",
    )
    ttft_weight: float = Field(
        _COST.ttft_weight,
        gt=0,
        le=1000,
        description="of the time to a request's own first token, against time that any request loses otherwise",
    )
    lateness_s: float = Field(_COST.lateness_s, gt=0, le=3600, description="a first token as late as this counts twice")
    overlap_credit: float = Field(
        _COST.overlap_credit, ge=0, le=1, description="what a block on the GPU saves, in blocks"
    )
    host_weight: float = Field(_COST.host_weight, ge=0, le=1, description="what a block in host memory saves")
    disk_weight: float = Field(_COST.disk_weight, ge=0, le=1, description="what a block on disk saves")
    prefill: dict[str, Any] = Field(
        {},
        description=f"{_OF_A_PHASE} prompts that another worker decodes; {_PHASE_FIELDS}",
    )
    decode: dict[str, Any] = Field(
        {}, description=f"{_OF_A_PHASE} requests whose prompt another worker computed; likewise"
    )
    temperature: float = Field(
        _POLICY.temperature, ge=0, le=100, description="0: the cheapest wins; more: drawn by softmax(-cost / T)"
    )
    seed: int = Field(0, ge=0, le=(1 << 64) - 1, description="of every draw and tie-break")
    newcomers: bool = Field(
        default=_POLICY.newcomers,
        description="a joining rank gets a bounded share of the requests of which no rank holds a block",
    )
    affinity: Affinity = Field(_POLICY.affinity, description="what a session's former rank means: off, soft or hard")
    affinity_discount: float = Field(
        _POLICY.affinity_discount, ge=0, lt=1, description="soft: by what share that rank costs less"
    )
    affinity_idle_s: float = Field(
        _AFFINITY.idle_s,
        ge=1,
        le=86_400,
        description="how long after its last request a session is still at home at its rank",
    )
    ttft_target_s: float | None = Field(
        _POLICY.ttft_target_s, gt=0, le=3600, description="predicted-ttft: longest time to a first token"
    )
    itl_target_s: float | None = Field(
        _POLICY.itl_target_s, gt=0, le=60, description="predicted-ttft: longest time between tokens"
    )
    unmet: Unmet = Field(
        _POLICY.unmet, description="requests that no rank is predicted to serve so: admit, queue or reject"
    )
    predict_on_route: bool = Field(
        default=_POLICY.predict_on_route,
        description="blocks on their way to a rank count as held: siblings of a burst land together",
    )
    approximate_ttl_s: float = Field(
        _APPROXIMATE.ttl_s,
        ge=1,
        le=86_400,
        description="how long a routed block counts at a rank without events; costs memory",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _is_a_mode(cls, mode: object, info: ValidationInfo) -> object:
        known = (*MODES, *info.data.get("user_modes", ()))
        if mode not in known:
            raise ValueError(f"allowed {', '.join(known)}")
        return mode

    @field_validator("prefill", "decode")
    @classmethod
    def _overrides(cls, phase: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known = PhaseOverrides.__struct_fields__
        if foreign := [name for name in phase if name not in known]:
            raise ValueError(f"found {shortened(foreign[0])}, allowed {', '.join(known)}")
        named = {name: value for name, value in phase.items() if value is not None}
        try:
            section = cls(user_modes=info.data.get("user_modes", ()), **named)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(refused(wrong)) from error
        return phase | {name: getattr(section, name) for name in named}

    def affinity_limits(self) -> AffinityLimits:
        """Return the bounds of session affinity."""
        return AffinityLimits(idle_s=self.affinity_idle_s)

    def approximate(self) -> ApproximateLimits:
        """Return the bounds of the approximate index."""
        return ApproximateLimits(ttl_s=self.approximate_ttl_s)

    def policy(self) -> Policy:
        """Return the policy."""
        return picked(
            self,
            Policy,
            parameters=picked(self, CostParameters),
            prefill=PhaseOverrides(**self.prefill),
            decode=PhaseOverrides(**self.decode),
        )


class DisaggregationSection(Section):
    """Prompts computed by other workers than those that decode, where a model has workers of both roles."""

    enabled: bool = Field(default=True, description="false: workers that decode compute their prompts themselves")
    accept_params: bool = Field(
        default=False, description="take requests for one phase, with disaggregated_params: behind `router pools`"
    )
    conditional: ConditionalPolicy = Field(
        "off",
        description="prompts that decode workers compute: off, isl_bounding, prefill_load, isl_or_load",
    )
    effective_isl_tokens: int = Field(
        2048,
        ge=0,
        le=1 << 30,
        description="isl_bounding: only prompts with fewer tokens that are not held there",
    )
    effective_isl_ratio: float = Field(
        0.7,
        ge=0,
        le=1,
        description="isl_bounding: and only where these are a smaller share of the prompt",
    )
    prefill_busy: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="prefill_load: queued tokens of every prefill rank / max_num_batched_tokens",
    )
    decode_busy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="decode ranks that use a larger share of their blocks compute no prompts",
    )

    @model_validator(mode="after")
    def _load_has_a_bound(self) -> "DisaggregationSection":
        if self.conditional in ("prefill_load", "isl_or_load") and self.prefill_busy is None:
            raise ValueError(f"prefill_busy: found null, allowed a number where conditional is {self.conditional}")
        return self


# -------------------------------------------------------------------------------------------------- modes of users


def load_modes(names: Sequence[str]) -> dict[str, Mode]:
    """Return the built-in modes and those with these names.

    Raises:
        ConfigurationError: a name has another form, cannot be imported, or is no function with these arguments; the
            error names all problems.
    """
    modes, problems = dict(MODES), list[str]()
    for name in names:
        try:
            modes[name] = _mode(name)
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)
    return modes


def _mode(name: str) -> Mode:
    function = _imported(name)
    try:
        signature(function).bind(*range(_ARGUMENTS_OF_A_MODE))
    except (TypeError, ValueError) as error:
        raise _wrong(name, f"what cannot be called so: {error}", "(candidates, request, policy, seed)") from error
    return Mode(
        function,
        reads_overlap=bool(getattr(function, "reads_overlap", True)),
        reads_load=bool(getattr(function, "reads_load", True)),
        reads_rates=bool(getattr(function, "reads_rates", False)),
    )


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise _wrong(name, "another form", "package.module:function")
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _wrong(name, str(error), "a function that can be imported") from error
    if not callable(function):
        raise _wrong(name, f"{type(function).__name__}", "a function")
    return function  # type: ignore[no-any-return]  # any callable


def _wrong(name: str, found: str, allowed: str) -> ConfigurationError:
    return ConfigurationError([f"policy.user_modes: {name!r}: found {found}, allowed {allowed}"])
