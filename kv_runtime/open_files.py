"""File descriptors of this process: limit and use. Every connection takes one."""

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

RESERVED = 96
"""Descriptors not for clients: refusals, a control plane, reconnects to the event log, name look-ups, files."""


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
    used = sum(1 for _ in Path("/dev/fd").iterdir()) - 1  # one of them lists the others
    return OpenFiles(used, sys.maxsize if soft == resource.RLIM_INFINITY else soft)
