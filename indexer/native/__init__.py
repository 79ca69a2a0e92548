"""The C++ core of the index, if it was built; `load` returns it.

An extension that cannot be loaded (damaged, or built for another machine) counts as missing.
"""

import importlib
from functools import cache
from typing import Protocol

from typing_extensions import Buffer


class NativeCore(Protocol):
    """The interface of the extension."""

    HAS_XXHASH: bool
    """Whether it was built with xxhash's header; `hash_blocks` exists only then."""

    def hash_blocks(self, tokens: Buffer, block_size: int, seed: int, is_eagle: bool) -> bytes:  # noqa: FBT001
        """Return the sequence hashes (little-endian u64s) of the full blocks of `tokens` (u32s)."""


@cache
def load() -> NativeCore | None:
    """Return the extension, or None if it is missing."""
    try:
        return extension()
    except ImportError:
        return None


def extension() -> NativeCore:
    """Return the extension; raise `ImportError` with the reason if it is missing."""
    return importlib.import_module("indexer.native._core")
