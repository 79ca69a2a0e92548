"""How many connections fit into the file descriptors of the process.

    limit of open files = used at the start + RESERVED + clients' connections + connections to workers

A request takes one descriptor of each side, so a side gets half of what is free, 16,384 at most.
"""

from typing import NamedTuple

from kv_runtime.open_files import RESERVED, OpenFiles
from router.http.limits import HttpLimits

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
    clients = min(limits.connections_max, max(free // 2, free - limits.worker_connections_max))
    return Capacity(clients, min(limits.worker_connections_max, free - clients))
