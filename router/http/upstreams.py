"""Workers' addresses and their idle connections, and the opening of new ones (`worker.py` has a connection's life).

The connection used last is lent first.
"""

import asyncio
import errno
import socket
import ssl
from asyncio import get_running_loop
from functools import lru_cache
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import structlog

from kv_protocol.decode_time import DECODE_HEADER
from kv_runtime.clock import Clock
from kv_runtime.supervise import TaskSet, TaskSetFull
from kv_runtime.telemetry import RateLimitedLog
from router.http.exchange import Exchange, OutboundCall
from router.http.heads import HOP_BY_HOP, AnswerReader, RequestWriter
from router.http.limits import HttpLimits
from router.http.sites import CORS_HEADERS
from router.http.worker import WorkerConnection
from router.native import built

if TYPE_CHECKING:
    from router.http.exchange import ResponseHandler, UpstreamStage

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


built.name_relay(WorkerConnection, Exchange, OutboundCall, UpstreamOrigin)


class Upstreams:
    """All connections to workers. Tasks of `dials` open new ones; the plane sets it at its start."""

    def __init__(self, limits: HttpLimits, not_passed_on: frozenset[bytes] = OURS) -> None:
        """`not_passed_on` are headers of workers, in lower case, that clients do not get."""
        self.limits = limits
        self.connections_max = limits.worker_connections_max
        """Lowered to what the limit of open files allows, once that is known."""
        self.origin = lru_cache(ORIGINS_MAX)(UpstreamOrigin)
        """Returns the address of a URL."""
        self._tls: ssl.SSLContext | None = None
        self.answers = AnswerReader(not_passed_on)
        self.dials: TaskSet | None = None
        self.connections: set[WorkerConnection] = set()
        self.opened = 0
        """Connections that were opened since the start."""
        self._log = RateLimitedLog(_log, Clock())

    @property
    def idle(self) -> int:
        """Idle connections."""
        return sum(each in each.origin.idle for each in self.connections)

    def abort(self) -> None:
        """Close all connections."""
        for connection in tuple(self.connections):
            connection.transport.abort()

    def dial(
        self,
        origin: UpstreamOrigin,
        exchange: Exchange,
        call: OutboundCall,
        watcher: "ResponseHandler",
        since_s: float = 0.0,
    ) -> None:
        """Send a call, which is forwarded since then or now, over a new connection."""
        since_s = since_s or get_running_loop().time()
        connection = WorkerConnection(self, origin, exchange, call, watcher, since_s)
        stage: UpstreamStage = "local"
        if origin.fault:
            stage, reason = "connect", origin.fault
        elif self.dials is None:
            reason = "the router stops"
        elif len(self.connections) + len(self.dials) >= self.connections_max and not self._close_idle():
            reason = f"{self.connections_max} connections to workers are open; try again"
        else:
            try:
                connection.dial = self.dials.spawn(self._open(connection))
            except TaskSetFull as error:
                reason = str(error)
            else:
                return
        connection.fail(stage, reason)

    def _close_idle(self) -> bool:
        """Close an idle connection to make room for another; return whether there was one."""
        for connection in self.connections:
            if connection in connection.origin.idle and not connection.transport.is_closing():
                del connection.origin.idle[connection]
                connection.transport.abort()
                return True
        return False

    async def _open(self, connection: WorkerConnection) -> None:
        stage: UpstreamStage = "connect"
        origin, connect_s = connection.origin, connection.call.limits.connect_s
        try:
            if origin.tls and self._tls is None:
                self._tls = ssl.create_default_context()
            async with asyncio.timeout(connect_s) as connection.deadline:
                await get_running_loop().create_connection(
                    lambda: cast("asyncio.Protocol", connection),
                    origin.host, origin.port, ssl=self._tls if origin.tls else None,
                    ssl_handshake_timeout=connect_s if origin.tls else None,  # uvloop holds it for as long
                )  # fmt: skip
        except TimeoutError:
            reason = f"TimeoutError: not connected within {connect_s:g} s"
        except (OSError, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if _is_local(error):
                self._log.error("dial_failed", key=origin.base_url, base_url=origin.base_url, reason=reason)
                stage, reason = "local", "the router has no resources for another connection to a worker; try again"
        else:
            return
        connection.not_opened(stage, reason)


def _is_local(error: Exception) -> bool:
    """Return whether this machine, not the worker, caused a failed connection."""
    if isinstance(error, socket.gaierror):
        return error.errno in _LOCAL_RESOLVER_ERRORS
    return isinstance(error, OSError) and error.errno in _LOCAL_ERRORS
