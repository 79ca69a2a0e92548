"""Connections to workers, which are kept alive and lent to one call at a time; and workers' addresses.

    opened --> lent --the answer is read completely, and the worker keeps the connection open--> idle --> lent
                    --anything else--> closed
    idle --`worker_idle_s` passed, unexpected bytes, or the worker closed it--> closed

The connection used last is lent first. If a connection that was used before ends without a byte of an answer, the
worker probably closed it before the request came: the request is sent again, over a new one, unless it `is_once`.
"""

import asyncio
import errno
import math
import socket
import ssl
from asyncio import get_running_loop
from collections.abc import Callable
from functools import cached_property
from typing import cast
from urllib.parse import urlsplit

import structlog

from kv_protocol.decode_time import DECODE_HEADER
from kv_runtime.clock import Clock
from kv_runtime.supervise import TaskSet, TaskSetFull
from kv_runtime.telemetry import RateLimitedLog
from router.http.exchange import Exchange, OutboundCall, ResponseHandler, UpstreamStage
from router.http.heads import HOP_BY_HOP, AnswerReader, Malformed, RequestWriter
from router.http.limits import HttpLimits
from router.http.relay import NONE, AnswerRelay
from router.http.sites import CORS_HEADERS
from router.native import built

CONNECT_S = 2.0
"""How long it may take to connect to a worker: enough if one SYN is lost, which is sent again after a second."""
DIALS_MAX = 4096
"""Connections that may be opened at the same time."""
ORIGINS_MAX = 8192
"""Addresses that are known, twice as many as a fleet has workers; idle connections to a forgotten one are not lent."""
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
    """A worker's address, and its idle connections, the last used last."""

    __slots__ = ("base_url", "fault", "host", "idle", "port", "tls", "writer")

    def __init__(self, base_url: str) -> None:
        self.base_url, self.fault = base_url, ""
        """`fault`: why no call can be sent to it; empty: it can."""
        try:
            parts = urlsplit(base_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"base_url: found {base_url!r}, allowed http(s)://host:port")  # noqa: TRY301
            self.tls = parts.scheme == "https"
            self.host, self.port = parts.hostname, parts.port or (443 if self.tls else 80)
            host = f"[{self.host}]" if ":" in self.host else self.host
            lines = f"host: {host}:{self.port}\r\naccept-encoding: identity\r\ncontent-length: ".encode("ascii")
            self.writer = RequestWriter(parts.path.rstrip("/").encode("ascii"), lines)
        except ValueError as error:
            self.fault = str(error)
        self.idle: dict[WorkerConnection, None] = {}


class UpstreamOrigins(dict[str, UpstreamOrigin]):
    """Workers' addresses by URL: the newest `ORIGINS_MAX`."""

    def __missing__(self, base_url: str) -> UpstreamOrigin:
        if len(self) == ORIGINS_MAX:
            del self[next(iter(self))]
        origin = self[base_url] = UpstreamOrigin(base_url)
        return origin


class WorkerConnection(AnswerRelay, asyncio.Protocol):
    """One connection to a worker."""

    __slots__ = ("deadline",)

    deadline: asyncio.Timeout
    """The timeout of the task that opens the connection."""

    async def open(self) -> None:
        """Open the connection; if that fails, its call fails."""
        stage: UpstreamStage = "connect"
        upstreams, origin = self.upstreams, self.origin
        try:
            async with asyncio.timeout(CONNECT_S) as self.deadline:
                await get_running_loop().create_connection(
                    lambda: self,
                    origin.host, origin.port, ssl=upstreams.tls if origin.tls else None,
                    ssl_handshake_timeout=CONNECT_S if origin.tls else None,  # uvloop's default would hold it longer
                )  # fmt: skip
        except TimeoutError:
            reason = f"TimeoutError: not connected within {CONNECT_S:g} s"
        except (OSError, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if _is_local(error):
                upstreams.dials_log.error("dial_failed", key=origin.base_url, base_url=origin.base_url, reason=reason)
                stage, reason = "local", "the router has no resources for another connection to a worker; try again"
        else:
            return
        finally:
            self.deadline = NONE  # it refers to the task, and a cancelled task to this connection
        exchange, self.dial = self.exchange, None
        if exchange is not None:
            self._step(exchange, self.fail, stage, reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established: send the call, unless it was given up, or the connection came too late."""
        opened = cast("asyncio.Transport", transport)
        exchange, call, upstreams, self.dial = self.exchange, self.call, self.upstreams, None
        if exchange is None or self.deadline.expired():
            opened.abort()
            return
        self.deadline.reschedule(None)  # else its task may be cancelled: then uvloop never reports the connection's end
        self.transport = opened
        upstreams.opened += 1
        upstreams.connections.add(self)
        self.is_open = True
        try:
            self.transport.writelines(self.origin.writer.request(call.method, call.path, call.headers, call.body))
            if self.paused:
                self.transport.pause_reading()
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandon`
            self.abandon(exchange)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the worker."""
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()
            return
        try:
            self.receive(exchange, data)
        except Malformed as error:
            self._step(exchange, self.fail, "first_byte" if self.body is None else "body", str(error))
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandon`
            self.abandon(exchange)

    def _step(self, exchange: Exchange, step: Callable[..., None], *arguments: object, **options: object) -> None:
        """Take a step of the call; if it raises, abandon the call."""
        try:
            step(*arguments, **options)
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandon`
            self.abandon(exchange)

    def eof_received(self) -> None:
        """The worker sends no more; asyncio then closes both directions."""
        self._ended(clean=True)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is lost either way
        """The connection is closed."""
        if not self.is_open:  # its call was given up, or `open` fails it
            return
        self.origin.idle.pop(self, None)
        self.upstreams.connections.discard(self)
        self._ended(clean=False)
        self.due_s = math.inf

    def _ended(self, *, clean: bool) -> None:
        exchange, body = self.exchange, self.body
        if exchange is None:
            return
        if body is None and not (self.is_fresh or self.has_part or self.call.is_once):
            call, watcher = self.call, self.watcher
            self.exchange, self.call, self.watcher = None, NONE, NONE
            since_s = self.since_s if self.due_s else 0.0
            self._step(exchange, self.upstreams.dial, self.origin, exchange, call, watcher, since_s)
        elif clean and body is not None and body.until_close and exchange.client is not None:
            self._step(exchange, self.end, exchange, body, extra=True)
        else:
            self._step(exchange, self.fail, self.stage, "the connection closed before the answer's end")

    def check_timeouts(self, now_s: float) -> None:
        """Check the timeouts of the call, or how long the connection is idle."""
        if not self.due_s:
            self.since_s = now_s
        exchange, self.due_s = self.exchange, now_s
        if exchange is not None:
            self._step(exchange, self.check_call, exchange, now_s)
            return
        self.due_s = self.since_s + self.upstreams.limits.worker_idle_s
        if now_s > self.due_s:
            self.transport.abort()


built.name_relay(WorkerConnection, Exchange, OutboundCall, UpstreamOrigin)


class Upstreams:
    """All connections to workers. Tasks of `dials`, which `HttpPlane.run` sets, open new ones."""

    def __init__(self, limits: HttpLimits, not_passed_on: frozenset[bytes] = OURS) -> None:
        """`not_passed_on` are headers of workers, in lower case, that clients do not get."""
        self.limits = limits
        self.connections_max = limits.worker_connections_max
        """Lowered to what the limit of open files allows, once that is known."""
        self.origins = UpstreamOrigins()
        self.answers = AnswerReader(not_passed_on)
        self.dials: TaskSet | None = None
        self.connections: set[WorkerConnection] = set()
        self.opened = 0
        """Connections that were opened since the start."""
        self.dials_log = RateLimitedLog(_log, Clock())

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """The context of connections to workers with `https`; raise `ssl.SSLError` if there can be none."""
        return ssl.create_default_context()

    @property
    def idle(self) -> int:
        """Idle connections."""
        return sum(len(origin.idle) for origin in self.origins.values())

    def abort(self) -> None:
        """Close all connections."""
        for connection in tuple(self.connections):
            connection.transport.abort()

    def dial(
        self,
        origin: UpstreamOrigin,
        exchange: Exchange,
        call: OutboundCall,
        watcher: ResponseHandler,
        since_s: float = 0.0,
    ) -> None:
        """Send a call over a new connection. `since_s`: when it was forwarded; 0: now."""
        since_s = since_s or get_running_loop().time()
        connection = exchange.relay = WorkerConnection(self, origin, exchange, call, watcher, since_s)
        stage: UpstreamStage = "local"
        if origin.fault:
            stage, reason = "connect", origin.fault
        elif self.dials is None:
            reason = "the router stops"
        elif len(self.connections) + len(self.dials) >= self.connections_max and not self._close_idle():
            reason = f"{self.connections_max} connections to workers are open; try again"
        else:
            try:
                connection.dial = self.dials.spawn(connection.open())
            except TaskSetFull as error:
                reason = str(error)
            else:
                return
        connection.fail(stage, reason)

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


def _is_local(error: Exception) -> bool:
    """Return whether this machine, not the worker, caused a failed connection."""
    if isinstance(error, socket.gaierror):
        return error.errno in _LOCAL_RESOLVER_ERRORS
    return isinstance(error, OSError) and error.errno in _LOCAL_ERRORS
