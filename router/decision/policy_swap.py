"""Changes the policy while requests flow, with the checks of the configuration's section `policy`.

    PATCH   the named fields change, the others stay
    PUT     the named fields are set, the others get their defaults

What the folds were made with (`seed`, `user_modes`, the bounds of the approximate index and of sessions) cannot change
while the router runs. A decision is taken with one policy or with the other, never with something between.
"""

from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import msgspec
from pydantic import ValidationError

from kv_protocol.errors import shortened
from kv_protocol.openai.errors import as_json
from kv_runtime.config.loading import ConfigurationError, unknown_key
from kv_runtime.config.words import allowed
from router.decision.policies import MODES, Mode
from router.decision.policy import CostParameters, Policy
from router.decision.policy_config import PolicySection

PROBLEMS_MAX = 8
"""An error names this many problems, and states how many more there are."""
FIELDS = (*(name for name in Policy.__struct_fields__ if name != "parameters"), *CostParameters.__struct_fields__)


def fields_of(policy: Policy) -> dict[str, Any]:
    """Return the policy's fields by their names in the configuration."""
    own: dict[str, Any] = msgspec.to_builtins(policy)
    return {**own.pop("parameters"), **own}


def swapped(policy: Policy, named: Mapping[str, Any], modes: Mapping[str, Mode], *, replace_all: bool) -> Policy:
    """Return the policy with these fields; the others stay, or with `replace_all` get their defaults.

    Raises:
        ConfigurationError: a field is none of a policy, cannot change now, or has a value that is not allowed. It names
            the first `PROBLEMS_MAX` of them.
    """
    foreign = [name for name in named if name not in FIELDS]
    own = {name: value for name, value in named.items() if name in FIELDS}
    no_modes = [own.pop("mode")] if "mode" in own and own["mode"] not in tuple(modes) else []
    user_modes = tuple(name for name in modes if name not in MODES)
    wrong: list[Any] = []
    try:
        section = PolicySection(user_modes=user_modes, **{**({} if replace_all else fields_of(policy)), **own})
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    if count := len(foreign) + len(no_modes) + len(wrong):
        problems = chain(
            (_foreign(name, named[name]) for name in foreign),
            (f"policy.mode: found {as_json(mode)}, allowed {', '.join(modes)}" for mode in no_modes),
            (refused(each, "policy.") for each in wrong),
        )
        more = [f"and {count - PROBLEMS_MAX} more"] if count > PROBLEMS_MAX else []
        raise ConfigurationError([*islice(problems, PROBLEMS_MAX), *more])
    return section.policy()


def _foreign(name: str, value: object) -> str:
    if name in PolicySection.model_fields:
        return f"policy.{name}: found {as_json(value)}, allowed only at the start of the router"
    return f"policy.{shortened(name)}: {unknown_key(name, FIELDS)}"


def refused(error: Mapping[str, Any], section: str = "") -> str:
    """Return what is wrong with a field, by one of pydantic's errors; `section` stands before the field's name."""
    return f"{section}{field_of(error)}: found {as_json(error['input'])}, {allowed(error)}"


def field_of(error: Mapping[str, Any]) -> str:
    """Return the path of the field, without that of its section."""
    return ".".join(shortened(str(part)) for part in error["loc"])
