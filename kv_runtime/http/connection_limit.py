"""The connections of one aiohttp server: how many may be open, which are idle, and what happens at the bound.

| a client connects | outcome |
|---|---|
| fewer connections are open than the bound | the connection is served |
| the bound is reached, and some connection is idle | the connection that has been idle longest is closed |
| the bound is reached, and no connection is idle | 503 with `Retry-After`, then the new connection is closed |
| `CLOSING_MAX` connections above the bound are open | the same |

A connection is idle while no handler runs for it: it is new, kept alive, or its client has not read all of an answer.
Closings and refusals at the bound are counted and logged. Every connection takes a file descriptor, so the bound
depends on the limit of open files.
"""

from collections.abc import Iterator
from typing import Protocol

import structlog

from kv_runtime.clock import Clock
from kv_runtime.files import RESERVED, OpenFiles
from kv_runtime.http.acceptor import ACCEPT_ERRORS
from kv_runtime.telemetry import Family, RateLimitedLog, by_name, counter, gauge

CONNECTIONS_MAX = 16_384
"""The default maximum of a server that is no control plane."""
CONTROL_CONNECTIONS_MAX = 32
"""The maximum of a control plane; the reserved files (`RESERVED`) include these."""
CONNECTIONS_MIN = 16
"""The minimum of a server's bound, however few files are free."""
CLOSING_MAX = 8
"""How many connections above the bound may be open while idle ones close, which takes one turn of the event loop."""

_log = structlog.get_logger("http")


def connections_bound(connections_max: int, files: OpenFiles) -> int:
    """Return how many connections a server may have: half of the free files, at most `connections_max`.

    The other half is for connections that serving the requests needs, such as those of an agent to its engine.
    """
    free = files.allowed - files.used - RESERVED
    return min(connections_max, max(CONNECTIONS_MIN, free // 2))


class Connection(Protocol):
    """A connection as its server counts it."""

    def shut(self) -> None:
        """Close the connection without waiting for the client."""


class Connections:
    """Admits connections up to `bound`; at the bound closes an idle one for each new one."""

    def __init__(self, bound: int, clock: Clock) -> None:
        self.bound = bound
        self._log = RateLimitedLog(_log, clock)
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """The connection that has been idle longest comes first."""
        self._idle_closed = self._refused = 0

    def admit(self) -> bool:
        """Return whether one more connection may open; the caller counts it (`opened`) at once."""
        count = len(self._open)
        if count >= self.bound and (count >= self.bound + CLOSING_MAX or not self._close_idle()):
            self._refused += 1
            self._note("refused")
            return False
        return True

    def opened(self, connection: Connection) -> None:
        """Record that an admitted connection opens; it is in use until `ended`."""
        self._open.add(connection)

    def closed(self, connection: Connection) -> None:
        """Record that the connection is being closed, or that its client left before it was open."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def began(self, connection: Connection) -> None:
        """Record that a handler runs for a request on the connection."""
        self._idle.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        """Record that the connection is open, or a handler ended; it is idle unless it is closed."""
        if connection in self._open:
            self._idle[connection] = None

    def _close_idle(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self._idle_closed += 1
        self._note("idle_closed")
        oldest.shut()
        return True

    def _note(self, outcome: str) -> None:
        self._log.warning("connections_bound_reached", key=outcome, outcome=outcome, connections_max=self.bound)

    def families(self, accept_failures: dict[str, int]) -> Iterator[Family]:
        """Yield the open connections, what happened at the bound, and failed accepts by the error's name."""
        idle = len(self._idle)
        states = by_name((), {"in_use": len(self._open) - idle, "idle": idle})
        meaning = "Open connections to this HTTP server: in_use while a request is served, else idle"
        yield gauge("server_connections", meaning, ("state",), states)
        meaning = "Largest number of open connections to this HTTP server"
        yield gauge("server_connections_max", meaning, (), [((), self.bound)])
        outcomes = by_name((), {"idle_closed": self._idle_closed, "refused": self._refused})
        meaning = "Connections that came while all allowed ones were open: an idle one was closed, or refused with 503"
        yield counter("server_connections_at_bound", meaning, ("outcome",), outcomes)
        failures, meaning = dict.fromkeys(ACCEPT_ERRORS, 0) | accept_failures, "Connections that could not be accepted"
        yield counter("server_accept_failures", f"{meaning}, by error", ("error",), by_name((), failures))
