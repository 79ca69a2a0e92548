"""The data plane: the address that clients connect to, and the connections to workers.

`start` binds and listens; connections wait in the system's queue. `run` serves until it is stopped:

    stop           the socket closes once the connections in its queue are accepted (`acceptor.py`)
    drain_idle_s   requests that still come are served; every answer says `connection: close`, and ends its connection.
                   Then connections without a request are closed
    drain_s        requests in flight are served to their end
    afterwards     the rest are ended: a stream by an error event, an answer that has not begun by 503, others by a cut
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from kv_runtime.files import OpenFiles, open_files
from kv_runtime.http.acceptor import BACKLOG, Acceptor
from kv_runtime.http.hosts import HostNames, is_loopback
from kv_runtime.supervise import TaskSet
from router.http.accounts import Account
from router.http.client import ClientConnection
from router.http.credentials import Credentials
from router.http.exchange import JSON, Exchange, own_answer
from router.http.heads import RequestHead, RequestReader
from router.http.limits import Capacity, HttpLimits, capacity
from router.http.refusals import unread
from router.http.sites import Sites
from router.http.upstreams import DIALS_MAX, OURS, Upstreams, WorkerConnection

REFUSED_MAX = 16
"""Connections beyond the bound that are held until their client has the refusal; further ones are closed at once."""

_PARTS = 8
"""The connections are checked for timeouts in at most this many parts, one after the other."""
_PART = 64
"""Fewer connections are one part: each part wakes the process."""
_OPEN_PATHS = frozenset({"/health", "/live", "/ready"})
"""Paths that probes ask for without a key."""

_log = structlog.get_logger("http")


class HttpPlane:
    """Gives every complete request to `service`, which answers or forwards it, now or later."""

    def __init__(
        self,
        service: Callable[[Exchange], object],
        limits: HttpLimits | None = None,
        *,
        posts: Mapping[str, Callable[[Exchange], object]] | None = None,
        sites: Sites | None = None,
        credentials: Credentials | None = None,
        not_passed_on: frozenset[bytes] = OURS,
        files: Callable[[], OpenFiles] = open_files,
    ) -> None:
        """`posts` serve POSTs to their paths in place of `service`.

        `sites` checks `Host` and `Origin`; without it, only names of loopback are served.

        `credentials` have the accounts and the certificate; None: clients need no key, and there is no TLS.
        `not_passed_on` are headers of workers that clients do not get; `files` is called once, by `start`.
        """
        self.service = service
        self.limits = limits or HttpLimits()
        self.upstreams = Upstreams(self.limits, not_passed_on)
        self.sites = sites or Sites(HostNames("127.0.0.1", setting="data.hosts"))
        self.credentials = credentials or Credentials()
        served = self.sites.served_hosts, self.sites.lines
        self.posts = dict(posts or {})
        self.requests = RequestReader(Exchange, *served, self.limits.body_bytes_max)
        self.requests.checks_all = self.credentials.accounts is not None
        self.draining = False
        self.draining_since_s = 0.0
        """Start of the drain, by the loop's clock."""
        self.loop: asyncio.AbstractEventLoop
        self.capacity = Capacity(self.limits.connections_max, self.limits.worker_connections_max)
        self._files = files
        self.acceptor = Acceptor(self._take)
        self._adoptions: TaskSet | None = None
        self._adopting = 0
        self.connections: set[ClientConnection] = set()
        """Open connections of clients."""
        self._all_closed = asyncio.Event()
        self.is_over = False
        self.accepted = 0
        """Connections that clients opened."""
        self.bodies_bytes = 0
        """Bytes of request bodies in memory, whole or not."""
        self.gone = 0
        """Requests whose client left before the answer was complete."""
        self.handshakes_failed = 0
        """Failed handshakes of TLS: the client left, spoke another protocol, or lacked the certificate it needs."""
        self.refusals = Counter[int]()
        """Refused messages by status (malformed, too large or too slow); connections beyond the bound as 503."""

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Bind the address, and compute how many connections the open files allow.

        Raises:
            PortUsed: another process has the address, or it is not of this machine.
            TooFewFiles: the limit of open files leaves no room for clients.
        """
        self.loop = asyncio.get_running_loop()
        if self.credentials.asks_for_nothing and not is_loopback(host):
            _log.warning("data_plane_open", host=host, advice="set data.accounts_file, or data.tls_client_ca")
        files = self._files()
        self.capacity = capacity(self.limits, files)
        self.upstreams.connections_max = self.capacity.workers
        if self.capacity.clients < self.limits.connections_max:
            _log.info("connections_bound_lowered", clients=self.capacity.clients, open_files=files.allowed)
        await self.acceptor.bind(host, port, reuse_port=reuse_port)

    @property
    def port(self) -> int:
        """The bound port, also if 0 was configured."""
        return self.acceptor.port

    @property
    def scheme(self) -> str:
        """How clients address it: http or https."""
        return "http" if self.credentials.tls is None else "https"

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. Afterwards no connection is open."""
        async with TaskSet(DIALS_MAX) as dials, TaskSet(BACKLOG) as adoptions:
            self.upstreams.dials, self._adoptions = dials, adoptions
            self.acceptor.start()
            checks = adoptions.create_task(self._check_timeouts())
            try:
                await stop.wait()
                await self._drain()
            finally:
                self.draining = self.is_over = self.requests.checks_all = True
                self.acceptor.close()
                await self._end()
                checks.cancel()

    async def _check_timeouts(self) -> None:
        """Once a period, check the connections that are due, in several parts: to check all at once would block."""
        while True:
            connections: list[ClientConnection | WorkerConnection] = [*self.connections, *self.upstreams.connections]
            parts = min(1 + len(connections) // _PART, _PARTS)
            for part in range(parts):
                await asyncio.sleep(self.limits.sweep_s / parts)
                now_s = self.loop.time()
                for each in connections[part::parts]:
                    if each.due_s <= now_s:
                        self.loop.call_soon(each.check_timeouts, now_s)

    @property
    def inflight(self) -> int:
        """Requests that are being served."""
        return sum(connection.is_serving for connection in self.connections)

    def in_progress(self) -> dict[str, int]:
        """Return how many requests and connections a drain has to wait for."""
        return {"requests": self.inflight, "connections": len(self.connections)}

    # ------------------------------------------------------------ called by connections

    @property
    def full_reason(self) -> str:
        """The error message for clients beyond the bound."""
        return f"{self.capacity.clients} connections are open, as many as are served at once; try again"

    def opened(self, connection: ClientConnection) -> str:
        """Register a client's connection; return why it is refused, empty if it is not."""
        self.accepted += 1
        self._adopting -= 1
        self.connections.add(connection)
        return self.full_reason if len(self.connections) > self.capacity.clients else ""

    def closed(self, connection: ClientConnection) -> None:
        """Remove a client's connection."""
        self.connections.discard(connection)
        self._note_closed()

    def account(self, head: RequestHead) -> Account | None:
        """Return the account of the request's key; None: it needs no key.

        Raises:
            Malformed: 401, the key is missing or unknown.
        """
        accounts = self.credentials.accounts
        if accounts is None or head.path in _OPEN_PATHS or self.sites.preflight(head.method, head.headers):
            return None
        return accounts.of(head.headers)

    # ------------------------------------------------------------ new connections

    def _take(self, accepted: socket.socket) -> None:
        assert self._adoptions is not None, "sockets are accepted while the plane runs"
        if len(self.connections) + self._adopting >= self.capacity.clients + REFUSED_MAX:
            self._turn_away(accepted, self.full_reason)
        elif len(self._adoptions) >= BACKLOG:
            self._turn_away(accepted, f"{BACKLOG} connections are being opened; try again")
        else:
            self._adopting += 1
            self._adoptions.spawn(self._adopt(accepted))

    def _turn_away(self, accepted: socket.socket, reason: str) -> None:
        """Close the connection; before, send the refusal in plain text, unless the client awaits a handshake of TLS.

        A client that has sent something may see a reset instead.
        """
        self.refusals[503] += 1
        refusal = unread(503, reason)
        answer = own_answer(503, refusal.body, JSON, refusal.headers, b"connection: close\r\n")
        with accepted, suppress(OSError):
            if self.credentials.tls is None:
                accepted.send(answer)

    async def _adopt(self, accepted: socket.socket) -> None:
        """Serve the connection, unless its client has left."""
        tls = self.credentials.tls
        try:
            await self.loop.connect_accepted_socket(
                lambda: ClientConnection(self),
                accepted,
                ssl=None if tls is None else tls.context,
                ssl_handshake_timeout=None if tls is None else self.limits.head_s,
            )
        except OSError:
            self.handshakes_failed += tls is not None
            accepted.close()
            self._adopting -= 1
            self._note_closed()

    # ------------------------------------------------------------ the end

    async def _drain(self) -> None:
        self.draining, self.draining_since_s = True, self.loop.time()
        self.requests.checks_all = True
        for connection in self.connections:
            connection.end_with_answer()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_s):
                await self.acceptor.stop(self.limits.drain_s)
                await self._until_all_closed()

    async def _until_all_closed(self) -> None:
        """Wait for the last connection to end."""
        self._all_closed.clear()
        if self.connections or self._adopting:
            await self._all_closed.wait()

    def _note_closed(self) -> None:
        if not self.connections and not self._adopting:
            self._all_closed.set()

    async def _end(self) -> None:
        self.upstreams.dials = None
        for connection in tuple(self.connections):
            connection.expire()
        self.upstreams.abort()
        await self._until_lingered()
        for connection in tuple(self.connections):
            connection.abort()
        await self._until_lingered()

    async def _until_lingered(self) -> None:
        """Wait for the last connection to end, at most `linger_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger_s):
                await self._until_all_closed()
