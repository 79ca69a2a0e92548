"""The limits of the machine, measured by the native extension, which is needed. Standard library only.

random_rmw    ns of one random read-modify-write of a table, many under way at once: what storing a block costs
pointer_chase ns of one random read that must wait for the one before
compare       ns of comparing two hot buffers: what matching that many bytes of hashes costs at least
"""

import ctypes
import mmap
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = mmap.PAGESIZE
_COMPARE_ROUNDS = 2000


def random_rmw_ns(table_bytes: int, operations: int, seed: int) -> dict[str, float]:
    """Return the limit of storing, by its name; empty where it cannot be measured."""
    core = _core()
    return {"limit": core.random_rmw_ns(table_bytes, operations, seed)} if core and table_bytes else {}


def compare_ns(compared_bytes: int) -> dict[str, float]:
    """Return the limit of matching, by its name; empty where it cannot be measured."""
    core = _core()
    return {"limit": core.compare_ns(compared_bytes, _COMPARE_ROUNDS)} if core else {}


def pointer_chase_ns(table_bytes: int, operations: int, seed: int) -> dict[str, float]:
    """Return the cost of a dependent read, by its name; empty where it cannot be measured."""
    core = _core()
    return {"limit": core.pointer_chase_ns(table_bytes, operations, seed)} if core else {}


def resident_bytes() -> int:
    """Return the memory of this process that is resident, what the allocator can give back given back; 0: not known."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _core() -> Any:  # noqa: ANN401 - the extension has no types here, and may be an earlier one
    try:
        core = import_module("indexer.native._core")
    except ImportError:  # not built, or damaged
        return None
    return core if hasattr(core, "random_rmw_ns") else None
