"""The C++ core of the index, where it could be built; `load` says whether it was."""

import importlib
from typing import Protocol


class NativeCore(Protocol):
    """What the extension offers."""

    def set_digest(self, hashes: bytes) -> int:
        """Return the digest (u64) of a set of sequence hashes, given as little-endian u64s."""


def load() -> NativeCore | None:
    """Return the extension, or None where it was not built."""
    try:
        return importlib.import_module("indexer.native._core")
    except ModuleNotFoundError:
        return None
