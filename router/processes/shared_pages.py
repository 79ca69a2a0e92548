"""Makes the memory of a parent small before it forks, and keeps it shared with its children.

* Garbage is collected, and what the heap holds free is returned to the system: a page that is shared and free is copied
  as soon as a child uses it.
* Pages of libraries that were needed to load them are unmapped, and mapped again where they are used.
* The collector never looks through what is there now again: it writes to what it looks through.
"""

import ctypes
import gc
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ +(/.*)?")


class Mapping(NamedTuple):
    """A mapping of a file into this process. `own_bytes`: of pages that differ from the file, swapped ones too."""

    start: int
    size: int
    permissions: str
    resident_bytes: int
    own_bytes: int


@contextmanager
def shared_pages() -> Iterator[None]:
    """Prepare the memory; while the block runs, the collector leaves alone what was there at its start."""
    gc.collect()
    give_back_free_memory()
    unmap_library_pages()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back_free_memory() -> None:
    """Return what the heap holds free to the system; no effect with other C libraries than glibc.

    Loading a tokenizer leaves tens of MiB. Source: malloc_trim(3).
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def unmap_library_pages() -> None:
    """Unmap the pages of files that cannot be written here and were not; they are in the system's cache.

    Source: madvise(2), MADV_DONTNEED: later reads get the file's contents again. Mappings with pages of their own, as
    those with relocated addresses, are left alone: such pages would lose what was written.
    """
    with suppress(AttributeError, OSError):
        advise = ctypes.CDLL(None, use_errno=True).madvise
        for each in file_mappings():
            if each.permissions in {"r-xp", "r--p"} and each.resident_bytes and not each.own_bytes:
                advise(ctypes.c_void_p(each.start), ctypes.c_size_t(each.size), mmap.MADV_DONTNEED)


def file_mappings() -> list[Mapping]:
    """Return the mappings of files. Source: Linux, Documentation/filesystems/proc.rst, `smaps`."""
    found = list[Mapping]()
    is_of_a_file = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        head = _MAPPING.match(line)
        if head is not None:
            is_of_a_file = head[4] is not None
            if is_of_a_file:
                start = int(head[1], 16)
                found.append(Mapping(start, int(head[2], 16) - start, head[3], 0, 0))
        elif is_of_a_file and line.startswith("Rss:"):
            found[-1] = found[-1]._replace(resident_bytes=_bytes(line))
        elif is_of_a_file and line.startswith(("Anonymous:", "Swap:")):
            found[-1] = found[-1]._replace(own_bytes=found[-1].own_bytes + _bytes(line))
    return found


def _bytes(line: str) -> int:
    return int(line.split()[1]) << 10
