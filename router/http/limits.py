"""Limits of the data plane: bytes that it accepts from clients, times that it waits, connections that it has.

    limit of open files = used at the start + RESERVED + clients' connections + connections to workers

A request takes a descriptor for its client and one for its worker, so each side gets half of the free ones, at most
16,384.
"""

from typing import NamedTuple

import msgspec

from kv_runtime.files import RESERVED, OpenFiles

CONNECTIONS_MAX = 16_384
CLIENTS_MIN = 16
"""The data plane does not start with room for fewer clients."""
_REMEDY = "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of containers)"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, counts and seconds. Beyond a limit the request is refused, or the connection closed."""

    body_bytes_max: int = 64 << 20
    bodies_bytes_max: int = 1 << 30
    """Bytes of all requests' bodies, until they are answered. A body that arrives in one read is not counted."""
    head_s: float = 20.0
    """Longest time for a request's head, from its first byte or from the connection's beginning."""
    body_s: float = 30.0
    """Longest pause within a request's body."""
    body_total_s: float = 300.0
    """Longest time for a request's complete body."""
    body_rate_min_bytes_s: float = 500.0
    """Smallest average rate of a body that takes longer than `body_s`; 0: any rate."""
    idle_s: float = 75.0
    """How long an idle connection is kept between requests: longer than balancers keep theirs (60 s)."""
    write_s: float = 60.0
    """How long a client may read nothing while bytes for it are pending: a phone out of reach comes back within it."""
    linger_s: float = 2.0
    """How long a refused client may go on sending, so that it can read the refusal."""
    connections_max: int = CONNECTIONS_MAX
    """Connections of clients; fewer if the limit of open files is lower."""
    pipelined_bytes_max: int = 64 << 10
    """Bytes of later requests that are read while one is served; beyond them reading stops until it is answered."""
    write_bytes_max: int = 64 << 10
    """Bytes that may wait for a slow client. If more wait, its worker is not read until only a quarter of it waits."""
    worker_connections_max: int = CONNECTIONS_MAX
    worker_idle_s: float = 4.0
    """How long an idle connection to a worker is kept; less than servers' own limit (uvicorn: 5 s)."""
    drain_s: float = 30.0
    """How long running requests may take after a stop."""
    drain_idle_s: float = 1.0
    """How long after a stop an idle connection may still bring a request, which is served."""
    sweep_s: float = 0.5
    """Period of checks for timeouts. A time is measured from a check on: its end may be noticed two periods late."""


class TooFewFiles(Exception):
    """The limit of open files leaves no room for clients."""


class Capacity(NamedTuple):
    """Connections that may be open at once."""

    clients: int
    workers: int


def capacity(limits: HttpLimits, files: OpenFiles) -> Capacity:
    """Return how many connections may be open.

    Raises:
        TooFewFiles: there is no room for `CLIENTS_MIN` requests.
    """
    free = files.allowed - files.used - RESERVED
    if free < 2 * CLIENTS_MIN:
        least = files.used + RESERVED + 2 * CLIENTS_MIN
        raise TooFewFiles(f"open files: found a limit of {files.allowed}, allowed {least} and more: {_REMEDY}")
    clients = min(limits.connections_max, max(free // 2, free - limits.worker_connections_max))
    return Capacity(clients, min(limits.worker_connections_max, free - clients))
