"""How many connections fit into the file descriptors of the process.

    limit of open files = used at the start + RESERVED + clients' connections + connections to workers

A request takes one descriptor of each side, so a side gets half of what is free, or what its setting allows.
"""

from typing import NamedTuple

from kv_runtime.open_files import RESERVED, OpenFiles
from router.http.limits import CONNECTIONS_MAX, HttpLimits

CLIENTS_MIN = 16
"""The data plane does not start with room for fewer clients."""
_REMEDY = "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of containers)"


class TooFewFiles(Exception):
    """The limit of open files leaves no room for clients."""


class Capacity(NamedTuple):
    """Connections that may be open at once."""

    clients: int
    workers: int


def capacity(limits: HttpLimits, files: OpenFiles) -> Capacity:
    """Return how many connections are served.

    Raises:
        TooFewFiles: there is no room for `CLIENTS_MIN` requests.
    """
    free = files.allowed - files.used - RESERVED
    if free < 2 * CLIENTS_MIN:
        least = files.used + RESERVED + 2 * CLIENTS_MIN
        raise TooFewFiles(f"open files: found a limit of {files.allowed}, allowed {least} and more: {_REMEDY}")
    clients = min(limits.connections_max or CONNECTIONS_MAX, max(free // 2, free - limits.worker_connections_max))
    return Capacity(clients, min(limits.worker_connections_max, free - clients))


def lowered(limits: HttpLimits, found: Capacity, files: OpenFiles) -> str:
    """Return why fewer clients are served than the setting says; empty: as many, or it says nothing."""
    wanted = limits.connections_max
    if wanted is None or found.clients >= wanted:
        return ""
    setting = f"data.connections_max is {wanted}, in force is {found.clients}"
    return f"{setting}: the limit of open files is {files.allowed}, {files.used} are used: {_REMEDY}"
