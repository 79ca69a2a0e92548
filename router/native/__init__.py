"""Loads of ranks, what was routed to them, and the arithmetic of costs in C++, if they were built: `load` returns them.

They are built with the index's (`indexer/native/`).
An extension that cannot be loaded (damaged, or built for another machine) counts as missing, and so does one that was
built from sources with another interface: a checkout that was updated and not built again.
"""

import importlib
from functools import cache
from typing import Any

INTERFACE = 4
"""Changes with the interface of the extension, here and in `module.cpp`."""


@cache
def load() -> Any:  # noqa: ANN401 - an extension
    """Return the extension, or None if it is missing."""
    try:
        built = importlib.import_module("router.native._load")
    except ImportError:
        return None
    return built if getattr(built, "INTERFACE", 0) == INTERFACE else None
