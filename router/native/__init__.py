"""The router's fold in C++ (`core.hpp`): it is built with the index's extension (`indexer/native/`).

The router does not run without it: importing this module fails if it is missing, damaged, of another machine, or
built from sources with another interface.
"""

from typing import Any

INTERFACE = 8
"""Changes with the interface of the extension, here and in `module.cpp`."""
_PACKAGES = ("indexer", "kv_protocol", "kv_runtime", "router")

try:
    from router.native import _fold as built
except ImportError as error:
    raise ImportError(f"the router's C++ extension is missing ({error})") from error
if getattr(built, "INTERFACE", 0) != INTERFACE:
    raise ImportError("the router's C++ extension is of another version")


def make_named_tuples_directly() -> None:
    """From now on C++ makes the named tuples of the project's loaded modules; they stay what they are.

    Calling their class costs a fifth to a tenth of before: their `__new__` is interpreted, in a wheel too.
    """
    made: Any
    for made in tuple.__subclasses__():
        if hasattr(made, "_field_defaults") and made.__module__.partition(".")[0] in _PACKAGES:
            built.make_directly(made)
