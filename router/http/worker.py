"""Connections to workers: kept alive, and lent to one request at a time.

    idle --send--> lent --the answer is read completely, and the worker keeps the connection open--> idle
                   lent --anything else--> closed
    idle --`worker_idle_s` passed, unexpected bytes, or the worker closed it--> closed

The connection used last is lent first. If a connection that was used before ends without a byte of an answer, the
worker probably closed it before the request came: the request is sent again, over a new one, unless it `is_once`.
"""

import asyncio
import errno
import socket
import ssl
from asyncio import get_running_loop
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import structlog

from kv_protocol.decode_time import DECODE_HEADER
from kv_runtime.clock import SystemClock
from kv_runtime.supervise import TaskSet, TaskSetFull
from kv_runtime.telemetry import RateLimitedLog
from router.http.exchange import Exchange, OutboundCall, ResponseHandler, UpstreamStage
from router.http.heads import HOP_BY_HOP, AnswerReader
from router.http.limits import HttpLimits
from router.http.relay import HEAD, ResponseRelay
from router.http.sites import CORS_HEADERS
from router.http.timeout_sweeper import TimeoutSweeper, Watched

DIALS_MAX = 4096
"""Connections that may be opened at the same time."""
_JOINED_BYTES_MAX = 16 << 10
"""Longer bodies are not copied into one buffer with their head."""
_REQUEST_LINES_MAX = 64
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of this machine: no worker could be reached now."""
_LOCAL_RESOLVER_ERRORS = frozenset({socket.EAI_SYSTEM, socket.EAI_MEMORY})
"""The resolver got no descriptor or memory: that says nothing of the worker's name."""
OURS = HOP_BY_HOP | CORS_HEADERS | {
    b"x-request-id", b"x-worker-instance-id", b"x-prefill-instance-id", b"x-dp-rank", b"x-decision-id",
    b"x-overlap-blocks", b"x-ignored-parameters", b"x-kv-unrendered", b"x-kv-failure", DECODE_HEADER.encode(),
}  # fmt: skip
"""Headers of a connection, headers that the router writes itself, and headers meant for the router only."""

_log = structlog.get_logger("http")


class UpstreamOrigin:
    """A worker's address, what its request heads begin with, and its idle connections, the last used last."""

    __slots__ = ("_host_line", "_prefix", "base_url", "connections", "dials", "host", "idle", "port", "starts", "tls")

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url: found {base_url!r}, allowed http(s)://host:port")
        self.base_url = base_url
        self.tls = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.tls else 80)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._host_line = f"host: {host}:{self.port}\r\naccept-encoding: identity\r\ncontent-length: ".encode("ascii")
        self._prefix = parts.path.rstrip("/")
        self.starts: dict[tuple[str, str], bytes] = {}
        self.idle: dict[WorkerConnection, None] = {}
        self.connections = self.dials = 0

    def start(self, method: str, path: str) -> bytes:
        """Return the beginning of a request's head, up to the value of `content-length`, and keep it in `starts`."""
        if len(self.starts) >= _REQUEST_LINES_MAX:
            self.starts.clear()
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("ascii")
        start = self.starts[method, path] = line + self._host_line
        return start


class Upstreams:
    """All connections to workers. Tasks of `dials` open new ones; the plane sets it at its start."""

    def __init__(
        self, limits: HttpLimits, timeout_sweeper: TimeoutSweeper, not_passed_on: frozenset[bytes] = OURS
    ) -> None:
        """`not_passed_on` are headers of workers, in lower case, that clients do not get."""
        self.limits, self.timeout_sweeper = limits, timeout_sweeper
        self.connections_max = limits.worker_connections_max
        """Lowered to what the limit of open files allows, once that is known."""
        self.origins: dict[str, UpstreamOrigin] = {}
        """By URL: the addresses with connections, or with one being opened."""
        self._tls: ssl.SSLContext | None = None
        self._heads = AnswerReader(not_passed_on)
        self.dials: TaskSet | None = None
        self.connections: set[WorkerConnection] = set()
        self.opened = 0
        """Connections that were opened since the start."""
        self._log = RateLimitedLog(_log, SystemClock())

    def forward(self, exchange: Exchange, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Send `call` to its worker, and relay its answer; `watcher` gets its events."""
        relay = exchange.relay = ResponseRelay(exchange, call, watcher, self._heads, get_running_loop().time())
        origin = self.origins.get(call.base_url)
        if origin is None:
            try:
                origin = self.origins[call.base_url] = UpstreamOrigin(call.base_url)
            except ValueError as error:
                relay.fail("connect", str(error))
                return
        idle = origin.idle
        while idle:
            connection, _ = idle.popitem()
            if not connection.transport.is_closing():
                connection.send(relay)
                return
        self.dial(origin, relay)

    def forget_unused(self, origin: UpstreamOrigin) -> None:
        """Forget an address without connections: workers leave, and their addresses do not come back."""
        if not (origin.connections or origin.dials) and self.origins.get(origin.base_url) is origin:
            del self.origins[origin.base_url]

    @property
    def idle(self) -> int:
        """Idle connections."""
        return sum(len(origin.idle) for origin in self.origins.values())

    def abort(self) -> None:
        """Close all connections."""
        for connection in tuple(self.connections):
            connection.transport.abort()

    def dial(self, origin: UpstreamOrigin, relay: ResponseRelay) -> None:
        """Send a call over a new connection."""
        if self.dials is None:
            reason = "the router stops"
        elif len(self.connections) + len(self.dials) >= self.connections_max and not self._close_idle():
            reason = f"{self.connections_max} connections to workers are open; try again"
        else:
            try:
                relay.dial = self.dials.spawn(self._dial_and_send(origin, relay))
            except TaskSetFull as error:
                reason = str(error)
            else:
                origin.dials += 1
                relay.dial.add_done_callback(partial(self._dial_ended, origin))  # also if the task never begins
                return
        self.forget_unused(origin)
        relay.fail("local", reason)

    def _close_idle(self) -> bool:
        """Close an idle connection to make room for another; return whether there was one."""
        for origin in self.origins.values():
            while origin.idle:
                connection = next(iter(origin.idle))
                del origin.idle[connection]
                if not connection.transport.is_closing():
                    connection.transport.abort()
                    return True
        return False

    def _dial_ended(self, origin: UpstreamOrigin, _: asyncio.Task[None]) -> None:
        origin.dials -= 1
        self.forget_unused(origin)

    async def _dial_and_send(self, origin: UpstreamOrigin, relay: ResponseRelay) -> None:
        phase: UpstreamStage = "connect"
        reason, connection = "", None
        try:
            async with asyncio.timeout(relay.call.limits.connect_s):
                connection = await self._connect(origin)
        except TimeoutError:
            reason = f"TimeoutError: not connected within {relay.call.limits.connect_s:g} s"
        except (OSError, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if _is_local(error):
                self._log.error("dial_failed", key=origin.base_url, base_url=origin.base_url, reason=reason)
                phase, reason = "local", "the router has no resources for another connection to a worker; try again"
        relay.dial = None
        try:
            if connection is None:
                relay.fail(phase, reason)
                return
            self.opened += 1
            if connection.transport.is_closing():  # the worker closed it at once
                relay.closed(clean=False)
            else:
                connection.enlist()
                connection.send(relay)
                if relay.paused:
                    connection.pause_reading()
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandoned`
            abandoned(relay)

    async def _connect(self, origin: UpstreamOrigin) -> "WorkerConnection":
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        _, connection = await get_running_loop().create_connection(
            lambda: cast("asyncio.Protocol", WorkerConnection(self, origin)),
            origin.host, origin.port, ssl=self._tls if origin.tls else None,
        )  # fmt: skip
        return cast("WorkerConnection", connection)


class WorkerConnection:
    """One connection to a worker. It implements `asyncio.Protocol` without deriving from it."""

    __slots__ = ("_idle_since_s", "_origin", "_relay", "_slot", "_upstreams", "_used", "transport")

    def __init__(self, upstreams: Upstreams, origin: UpstreamOrigin) -> None:
        self._upstreams, self._origin = upstreams, origin
        self._relay: ResponseRelay | None = None
        self._slot: set[Watched] | None = None
        self._used = False
        self._idle_since_s = 0.0
        """Time of the first timeout check since it is idle, which saves reading the clock; 0: not checked yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established. If the task that opens it was cancelled meanwhile, asyncio closes it."""
        self.transport = cast("asyncio.Transport", transport)

    def enlist(self) -> None:
        """Register the connection, and have its timeouts checked, until it is closed."""
        self._upstreams.connections.add(self)
        self._origin.connections += 1
        self._slot = self._upstreams.timeout_sweeper.add(self)

    def send(self, relay: ResponseRelay) -> None:
        """Lend this open connection to `relay`, and send the relay's call."""
        self._relay, relay.connection = relay, self
        call, origin = relay.call, self._origin
        body = call.body
        start = origin.starts.get((call.method, call.path)) or origin.start(call.method, call.path)
        if isinstance(body, bytes) and len(body) <= _JOINED_BYTES_MAX:
            self.transport.write(b"%b%d\r\n%b\r\n%b" % (start, len(body), call.headers, body))
            return
        parts = (body,) if isinstance(body, bytes) else body
        head = b"%b%d\r\n%b\r\n" % (start, sum(map(len, parts)), call.headers)
        self.transport.writelines((head, *parts))

    def data_received(self, data: bytes) -> None:
        """Take bytes from the worker."""
        relay = self._relay
        if relay is None:
            self.transport.abort()
            return
        try:
            if relay.state == HEAD:
                relay.feed_head(data)
            else:
                relay.feed(data)
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandoned`
            abandoned(relay)

    def pause_writing(self) -> None:
        """The worker reads slowly. Nothing has to be held back: a request is written once, when it is complete."""

    def resume_writing(self) -> None:
        """The worker reads again."""

    def eof_received(self) -> None:
        """The worker sends no more; asyncio then closes both directions."""
        self._ended(clean=True)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is lost either way
        """The connection is closed."""
        self._origin.idle.pop(self, None)
        if self._slot is not None:
            self._slot.discard(self)
            self._upstreams.connections.discard(self)
            self._origin.connections -= 1
            self._upstreams.forget_unused(self._origin)
        self._ended(clean=False)

    def _ended(self, *, clean: bool) -> None:
        relay, self._relay = self._relay, None
        if relay is None:
            return
        is_unanswered = relay.state == HEAD and not relay.has_part
        try:
            if self._used and is_unanswered and not relay.call.is_once:
                relay.connection = None
                self._upstreams.dial(self._origin, relay)
            else:
                relay.closed(clean=clean)
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandoned`
            abandoned(relay)

    def release(self, *, reusable: bool) -> None:
        """The relay's call is over: keep the connection as idle, or close it."""
        relay, self._relay = self._relay, None
        transport = self.transport
        if not reusable or transport.get_write_buffer_size():
            transport.abort()
            return
        if relay is not None and relay.paused:
            transport.resume_reading()
        self._used, self._idle_since_s = True, 0.0
        self._origin.idle[self] = None

    def pause_reading(self) -> None:
        """Nothing is read until `resume_reading`."""
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def check_timeouts(self, now_s: float) -> None:
        """Check the timeouts of the call, or how long the connection is idle."""
        relay = self._relay
        if relay is not None:
            try:
                relay.check_timeouts(now_s)
            except Exception:  # noqa: BLE001 - a fault of the router: see `abandoned`
                abandoned(relay)
        elif not self._idle_since_s:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > self._upstreams.limits.worker_idle_s:
            self.transport.abort()


def _is_local(error: Exception) -> bool:
    """Return whether this machine, not the worker, caused a failed connection."""
    if isinstance(error, socket.gaierror):
        return error.errno in _LOCAL_RESOLVER_ERRORS
    return isinstance(error, OSError) and error.errno in _LOCAL_ERRORS


def abandoned(relay: ResponseRelay) -> None:
    """Log a fault of the router and end the call, so that no client waits forever. Called within an `except`."""
    _log.exception("relay_failed")
    relay.abandon()
