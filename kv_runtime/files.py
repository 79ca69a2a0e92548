"""Files of this process: how many it may open, and files that it keeps for itself."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

RESERVED = 96
"""Descriptors that clients do not get: for refusals, a control plane, reconnects to the log, name look-ups, files."""


class OpenFiles(NamedTuple):
    """Descriptors in use, and the soft limit of them."""

    used: int
    allowed: int


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit; no effect if the system refuses."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files() -> OpenFiles:
    """Return the current figures."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(1 for _ in Path("/dev/fd").iterdir()) - 1  # one of them is open for this listing
    return OpenFiles(used, sys.maxsize if soft == resource.RLIM_INFINITY else soft)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file's content atomically, also with regard to a crash; its mode is 0600. `OSError` if that fails."""
    written = path.with_suffix(".new")
    with open(written, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # a file that a killed process left may have another mode
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
