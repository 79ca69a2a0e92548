"""Connections to workers: kept alive, and lent to one request at a time.

    idle --send--> lent --answer read, all of it, worker wants to go on--> idle
                   lent --anything else--> closed
    idle --worker_idle_s, bytes that nobody asked for, the worker's end--> closed

The connection used last is lent first. Where one that was used before ends without a byte of an answer, the worker had
closed it before the request came: the request is sent once more, over a new one, unless its call `is_once`.
"""

import asyncio
import errno
import socket
import ssl
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import structlog

from kv_protocol.decode_time import DECODE_HEADER
from kv_runtime.clock import SystemClock
from kv_runtime.supervise import TaskSet, TaskSetFull
from kv_runtime.telemetry import RateLimitedLog
from router.server.exchange import Exchange, OutboundCall, ResponseHandler, ResponseSink, UpstreamStage
from router.server.heads import HOP_BY_HOP, HeadReader
from router.server.limits import HttpLimits
from router.server.relay import ResponseRelay
from router.server.sites import CORS_HEADERS
from router.server.timeout_sweeper import TimeoutSweeper, Watched

DIALS_MAX = 4096
"""Connections that are being opened at one time."""
_JOINED_BYTES_MAX = 16 << 10
"""Longer bodies are not copied behind their head."""
_REQUEST_LINES_MAX = 64
_SYSTEMS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""What the system refuses us, whoever the worker is."""
_RESOLVERS = frozenset({socket.EAI_SYSTEM, socket.EAI_MEMORY})
"""What the resolver says where the system refused it a descriptor or memory: nothing about the worker's name."""
OURS = HOP_BY_HOP | CORS_HEADERS | {
    b"x-request-id", b"x-worker-instance-id", b"x-prefill-instance-id", b"x-dp-rank", b"x-decision-id",
    b"x-overlap-blocks", b"x-ignored-parameters", DECODE_HEADER.encode(),
}  # fmt: skip
"""Of a connection, said by the router itself, or said to the router alone."""

_log = structlog.get_logger("http")


class UpstreamStatistics(NamedTuple):
    """Connections to workers."""

    open: int
    idle: int
    dialing: int
    opened: int
    lent: int
    stale: int


class Origin:
    """A worker's address, what requests to it begin with, and its idle connections, last the one used last."""

    __slots__ = ("_host_line", "_lines", "_prefix", "base_url", "connections", "host", "idle", "port", "tls")

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url: found {base_url!r}, allowed http(s)://host:port")
        self.base_url = base_url
        self.tls = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.tls else 80)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._host_line = f"host: {host}:{self.port}\r\naccept-encoding: identity\r\ncontent-length: ".encode("ascii")
        self._prefix = parts.path.rstrip("/").encode("ascii")
        self._lines: dict[str, bytes] = {}
        self.idle: dict[WorkerConnection, None] = {}
        self.connections = 0

    def request_head(self, path: str, headers: bytes, body_bytes: int) -> bytes:
        """Return a POST's head."""
        start = self._lines.get(path)
        if start is None:
            if len(self._lines) >= _REQUEST_LINES_MAX:
                self._lines.clear()
            start = b"POST %b%b HTTP/1.1\r\n%b" % (self._prefix, path.encode("ascii"), self._host_line)
            self._lines[path] = start
        return b"%b%d\r\n%b\r\n" % (start, body_bytes, headers)


class Upstreams:
    """All connections to workers; new ones are opened by `dials`, while there are any."""

    def __init__(
        self, limits: HttpLimits, timeout_sweeper: TimeoutSweeper, not_passed_on: frozenset[bytes] = OURS
    ) -> None:
        """`not_passed_on` are names, in lower case, of workers' headers that clients do not get."""
        self._limits, self.timeout_sweeper = limits, timeout_sweeper
        self.connections_max = limits.worker_connections_max
        """As many as the open files allow, once that is known."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._origins: dict[str, Origin] = {}
        self._tls: ssl.SSLContext | None = None
        self._heads = HeadReader(not_passed_on)
        self.dials: TaskSet | None = None
        self.connections: set[WorkerConnection] = set()
        self._opened = self._lent = self._stale = 0
        self._log = RateLimitedLog(_log, SystemClock())

    @property
    def idle_s(self) -> float:
        """How long an idle connection is kept."""
        return self._limits.worker_idle_s

    def forward(
        self, exchange: Exchange, client: ResponseSink, call: OutboundCall, watcher: ResponseHandler, now_s: float
    ) -> None:
        """Send `call` to its worker; `watcher` hears of it."""
        splice = exchange.carried = ResponseRelay(exchange, client, call, watcher, self._heads, now_s)
        self._lent += 1
        origin = self._origins.get(call.base_url)
        if origin is None:
            try:
                origin = self._origins[call.base_url] = Origin(call.base_url)
            except ValueError as error:
                splice.fail("connect", str(error))
                return
        idle = origin.idle
        while idle:
            connection, _ = idle.popitem()
            if not connection.closing:
                connection.send(splice)
                return
        self._dial(origin, splice)

    def again(self, origin: Origin, splice: ResponseRelay) -> None:
        """Send a call over a new connection whose old one had been closed by the worker."""
        self._stale += 1
        self._dial(origin, splice)

    def stands(self, connection: "WorkerConnection", origin: Origin) -> set[Watched]:
        """A connection stands; return its slot in the sweep."""
        self.connections.add(connection)
        origin.connections += 1
        return self.timeout_sweeper.add(connection)

    def lost(self, connection: "WorkerConnection", origin: Origin) -> None:
        """A connection is gone; an address to which there are no more is forgotten."""
        self.connections.discard(connection)
        origin.connections -= 1
        if not origin.connections:
            self._origins.pop(origin.base_url, None)

    def statistics(self) -> UpstreamStatistics:
        """Return how many there are, and were."""
        return UpstreamStatistics(
            open=len(self.connections),
            idle=sum(len(origin.idle) for origin in self._origins.values()),
            dialing=0 if self.dials is None else len(self.dials),
            opened=self._opened,
            lent=self._lent,
            stale=self._stale,
        )

    def abort(self) -> None:
        """All connections are closed."""
        for connection in tuple(self.connections):
            connection.abort()

    def _dial(self, origin: Origin, splice: ResponseRelay) -> None:
        if self.dials is None:
            splice.fail("local", "the router stops")
            return
        if len(self.connections) + len(self.dials) >= self.connections_max and not self._closed_idle():
            splice.fail("local", f"data.worker_connections_max: {self.connections_max} connections are open; try again")
            return
        try:
            splice.dial = self.dials.spawn(self._dialed(origin, splice))
        except TaskSetFull as error:
            splice.fail("local", str(error))

    def _closed_idle(self) -> bool:
        """Close a connection that is idle, which makes room for another; return whether there was one."""
        for origin in self._origins.values():
            while origin.idle:
                connection = next(iter(origin.idle))
                del origin.idle[connection]
                if not connection.closing:
                    connection.abort()
                    return True
        return False

    async def _dialed(self, origin: Origin, splice: ResponseRelay) -> None:
        phase: UpstreamStage = "connect"
        reason, connection = "", None
        try:
            async with asyncio.timeout(splice.call.connect_s):
                connection = await self._connected(origin)
        except TimeoutError:
            reason = f"TimeoutError: not connected within {splice.call.connect_s:g} s"
        except (OSError, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if _is_ours(error):
                self._log.error("dial_failed", key=origin.base_url, base_url=origin.base_url, reason=reason)
                phase, reason = "local", "the router has no resources for another connection to a worker; try again"
        splice.dial = None
        try:
            if connection is None:
                splice.fail(phase, reason)
            else:
                self._opened += 1
                connection.enlist()
                connection.send(splice)
        except Exception:  # noqa: BLE001 - the edge: see `abandoned`
            abandoned(splice)

    async def _connected(self, origin: Origin) -> "WorkerConnection":
        tls = self._tls_context() if origin.tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cast("asyncio.Protocol", WorkerConnection(self, origin)), origin.host, origin.port, ssl=tls
        )
        return cast("WorkerConnection", connection)

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class WorkerConnection:
    """One connection to a worker: an `asyncio.Protocol` by its shape, not by its class."""

    __slots__ = ("_idle_since_s", "_origin", "_slot", "_splice", "_transport", "_upstreams", "_used")

    def __init__(self, upstreams: Upstreams, origin: Origin) -> None:
        self._upstreams, self._origin = upstreams, origin
        self._splice: ResponseRelay | None = None
        self._slot: set[Watched] | None = None
        self._used = False
        self._idle_since_s = 0.0
        """When time passed for it first since it is idle; 0: not yet. It is not worth a look at the clock."""

    @property
    def closing(self) -> bool:
        """Whether it ends, or has ended."""
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands. Whoever opens it may have been cancelled meanwhile, and then it is closed without a word."""
        self._transport = cast("asyncio.Transport", transport)

    def enlist(self) -> None:
        """It is one of the connections until it is lost, and time passes for it."""
        if not self._transport.is_closing():
            self._slot = self._upstreams.stands(self, self._origin)

    def send(self, splice: ResponseRelay) -> None:
        """Lend it to `splice`, whose call is sent."""
        if self._transport.is_closing():  # it was hardly open
            splice.closed(clean=False)
            return
        self._splice = splice
        splice.connection = self
        call = splice.call
        body = call.body
        if isinstance(body, bytes):
            head = self._origin.request_head(call.path, call.headers, len(body))
            if len(body) <= _JOINED_BYTES_MAX:
                self._transport.write(head + body)
            else:
                self._transport.writelines((head, body))
        else:
            head = self._origin.request_head(call.path, call.headers, sum(map(len, body)))
            self._transport.writelines((head, *body))
        if splice.paused:
            self.pause_reading()

    def data_received(self, data: bytes) -> None:
        """The worker sent something."""
        splice = self._splice
        if splice is None:
            self.abort()
            return
        try:
            splice.feed(data)
        except Exception:  # noqa: BLE001 - the edge: see `abandoned`
            abandoned(splice)

    def pause_writing(self) -> None:
        """The worker reads slowly. There is nothing to hold back: a request is written once, when all of it is here."""

    def resume_writing(self) -> None:
        """And reads again."""

    def eof_received(self) -> None:
        """The worker sends no more; both directions are closed."""
        self._ended(clean=True)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is lost either way
        """It is gone."""
        self._origin.idle.pop(self, None)
        if self._slot is not None:
            self._slot.discard(self)
            self._upstreams.lost(self, self._origin)
        self._ended(clean=False)

    def _ended(self, *, clean: bool) -> None:
        splice, self._splice = self._splice, None
        if splice is None:
            return
        if self._used and splice.unanswered and not splice.call.is_once:
            splice.connection = None
            self._upstreams.again(self._origin, splice)
            return
        try:
            splice.closed(clean=clean)
        except Exception:  # noqa: BLE001 - the edge: see `abandoned`
            abandoned(splice)

    def release(self, *, reusable: bool) -> None:
        """Its call is over: it is idle, or closed."""
        splice, self._splice = self._splice, None
        transport = self._transport
        if not reusable or transport.is_closing() or transport.get_write_buffer_size():
            transport.abort()
            return
        if splice is not None and splice.paused:
            transport.resume_reading()
        self._used = True
        self._idle_since_s = 0.0
        self._origin.idle[self] = None

    def abort(self) -> None:
        """Close it at once."""
        self._transport.abort()

    def pause_reading(self) -> None:
        """Nothing is read until `resume_reading`."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def check_timeouts(self, now_s: float) -> None:
        """Time passes."""
        splice = self._splice
        if splice is not None:
            try:
                splice.check_timeouts(now_s)
            except Exception:  # noqa: BLE001 - the edge: see `abandoned`
                abandoned(splice)
        elif not self._idle_since_s:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > self._upstreams.idle_s:
            self._transport.abort()


def _is_ours(error: Exception) -> bool:
    """Return whether this machine, not the worker, is why a connection failed."""
    if isinstance(error, socket.gaierror):
        return error.errno in _RESOLVERS
    return isinstance(error, OSError) and error.errno in _SYSTEMS


def abandoned(splice: ResponseRelay) -> None:
    """Whatever is wrong with us, it is in the log, and nobody waits for ever. Called where an exception is caught."""
    _log.exception("splice_failed")
    splice.abandon()
