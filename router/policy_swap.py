"""Another policy while requests flow: its fields are those of the configuration's `policy`, and are checked like them.

    PATCH   the fields that are named change, the others stay
    PUT     the fields that are named hold, the others have their defaults

What the folds were made with (`seed`, `user_modes`, the bounds of the approximate index and of sessions) cannot change
while the router runs. A decision is taken with one policy or with the other, never with something between.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from kv_runtime.config import ConfigurationError, unknown_key
from router.core.policies import MODES, Mode
from router.core.policy import CostParameters, Policy
from router.policy_config import PolicySection

FIELDS = (*(name for name in Policy.__struct_fields__ if name != "parameters"), *CostParameters.__struct_fields__)


def fields_of(policy: Policy) -> dict[str, Any]:
    """Return the policy's fields by the names that they have in the configuration."""
    own = msgspec.to_builtins(policy)
    return {**own.pop("parameters"), **own}


def swapped(policy: Policy, named: Mapping[str, Any], modes: Mapping[str, Mode], *, whole: bool) -> Policy:
    """Return the policy with these fields; the others stay, or with `whole` have their defaults.

    Raises:
        ConfigurationError: a field is none of a policy, cannot change now, or has a value that is not allowed.
    """
    problems = [
        f"policy.{name}: found {value!r}, allowed only at the start of the router"
        if name in PolicySection.model_fields
        else f"policy.{name}: {unknown_key(name, FIELDS)}"
        for name, value in named.items()
        if name not in FIELDS
    ]
    if not problems and "mode" in named and named["mode"] not in tuple(modes):
        problems.append(f"policy.mode: found {named['mode']!r}, allowed {', '.join(modes)}")
    if problems:
        raise ConfigurationError(problems)
    user_modes = tuple(name for name in modes if name not in MODES)
    try:
        section = PolicySection(user_modes=user_modes, **{**({} if whole else fields_of(policy)), **named})
    except ValidationError as error:
        raise ConfigurationError([_problem(found) for found in error.errors()]) from error
    return section.policy()


def _problem(found: Mapping[str, Any]) -> str:
    return f"policy.{'.'.join(map(str, found['loc']))}: found {found['input']!r}, allowed: {found['msg']}"
