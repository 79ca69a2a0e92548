"""Loads the modes that the configuration names: built-in ones, and functions of the user.

a user's mode     `package.module:function`, in `policy.user_modes`; nothing else is ever imported
the function      pure, `(candidates, request, policy, seed)` by position (`router/decision/policies.py`)
it returns        a `Choice`, or the index of a candidate
what it reads     its attributes reads_overlap, reads_load (by default True), reads_rates (False), if it has them
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kv_runtime.config.loading import ConfigurationError
from router.decision.policies import MODES, Mode

_ARGUMENTS = 4
_FIELD = "policy.user_modes"


def load_modes(names: Sequence[str]) -> dict[str, Mode]:
    """Return the built-in modes and those with these names.

    Raises:
        ConfigurationError: a name is not of that form, nothing of that name can be imported, or it cannot be called so;
            the error names all problems.
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
        inspect.signature(function).bind(*range(_ARGUMENTS))
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
    return ConfigurationError([f"{_FIELD}: {name!r}: found {found}, allowed {allowed}"])
