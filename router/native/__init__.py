"""Loads of ranks, what was routed to them, costs, and named tuples in C++, if they were built: `load` returns them.

They are built with the index's (`indexer/native/`).
An extension that cannot be loaded (damaged, or built for another machine) counts as missing, and so does one that was
built from sources with another interface: a checkout that was updated and not built again.
"""

import importlib
from functools import cache
from typing import Any

INTERFACE = 5
"""Changes with the interface of the extension, here and in `module.cpp`."""
_PACKAGES = ("indexer", "kv_protocol", "kv_runtime", "router")


@cache
def load() -> Any:  # noqa: ANN401 - an extension
    """Return the extension, or None if it is missing."""
    try:
        built = importlib.import_module("router.native._load")
    except ImportError:
        return None
    return built if getattr(built, "INTERFACE", 0) == INTERFACE else None


def make_named_tuples_directly() -> None:
    """From now on C++ makes the named tuples of the project's loaded modules, if it was built; they stay what they are.

    Calling their class costs a fifth to a tenth of before: their `__new__` is interpreted, in a wheel too.
    """
    built = load()
    for made in tuple.__subclasses__() if built is not None else ():
        if hasattr(made, "_field_defaults") and made.__module__.partition(".")[0] in _PACKAGES:
            built.make_directly(made)
