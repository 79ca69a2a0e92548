"""The load of ranks and the arithmetic of costs in C++, if they were built; `load` returns them.

They are built with the index's (`indexer/native/`).
An extension that cannot be loaded (damaged, or built for another machine) counts as missing.
"""

import importlib
from functools import cache
from typing import Any


@cache
def load() -> Any:  # noqa: ANN401 - an extension
    """Return the extension, or None if it is missing."""
    try:
        return importlib.import_module("router.native._load")
    except ImportError:
        return None
