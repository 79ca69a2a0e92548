"""The data plane: an address on which clients are served, and the connections to workers behind it.

`start` binds and listens: what comes waits in the system's queue. `run` serves until it is stopped:

    stop        no connection is accepted, idle ones are closed; a request that comes all the same gets 503
    drain_s     what is served goes on; each connection ends with its answer, which says so
    afterwards  what is not complete is ended: a stream by an error event, what has not begun by 503, else by a cut
"""

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple, cast

from kv_runtime.http import PortUsed, error_body
from kv_runtime.supervise import TaskSet
from router.http.client_side import ClientConnection
from router.http.exchange import Exchange
from router.http.heads import HeadReader
from router.http.limits import HttpLimits
from router.http.sweep import Sweep, Watched
from router.http.upstream import DIALS_MAX, OURS, Upstreams, UpstreamStatistics

_BACKLOG = 4096


class HttpStatistics(NamedTuple):
    """What there is now, and what was since the beginning."""

    connections: int
    inflight: int
    accepted: int
    requests: int
    gone: int
    """Clients that left before their answer was whole."""
    refused: dict[int, int]
    """What was no request, or too large, or too slow, by status."""
    upstream: UpstreamStatistics


class HttpPlane:
    """Gives every complete request to `service`, which answers it or forwards it, now or later."""

    def __init__(
        self,
        service: Callable[[Exchange], None],
        limits: HttpLimits | None = None,
        *,
        not_passed_on: frozenset[bytes] = OURS,
    ) -> None:
        """`not_passed_on` are headers of workers that clients do not get."""
        self._service = service
        self.limits = limits or HttpLimits()
        self.sweep = Sweep(self.limits.sweep_s)
        self.upstreams = Upstreams(self.limits, self.sweep, not_passed_on)
        self.heads = HeadReader()
        self.draining = False
        self.loop: asyncio.AbstractEventLoop
        self._sockets: list[socket.socket] = []
        self._connections: set[ClientConnection] = set()
        self._quiet = asyncio.Event()
        self._port = 0
        self._accepted = self._requests = self._inflight = self._gone = self._bodies_bytes = 0
        self._refused: dict[int, int] = {}

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """The address is bound.

        Raises:
            PortUsed: somebody else has it, or it is none of this machine's.
        """
        self.loop = asyncio.get_running_loop()
        try:
            found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                bound = _listening(family, (str(address[0]), self._port or port), reuse_port=reuse_port)
                self._sockets.append(bound)
                self._port = bound.getsockname()[1]
        except OSError as error:
            self._close_sockets()
            raise PortUsed(f"port: found {host}:{port}, which cannot be bound ({error.strerror})") from error

    @property
    def port(self) -> int:
        """The port in use, also where 0 was asked for."""
        return self._port

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain; afterwards no connection is left."""
        async with TaskSet(DIALS_MAX) as dials:
            self.upstreams.dials = dials
            servers = [
                await self.loop.create_server(
                    lambda: cast("asyncio.Protocol", ClientConnection(self)), sock=each, backlog=_BACKLOG
                )
                for each in self._sockets
            ]
            self.sweep.start()
            try:
                await stop.wait()
                self._begin_to_drain(servers)
                await self._no_connection(self.limits.drain_s)
            finally:
                self.draining = True
                for server in servers:
                    server.close()
                await self._end()

    def statistics(self) -> HttpStatistics:
        """Return the figures of now."""
        return HttpStatistics(
            connections=len(self._connections),
            inflight=self._inflight,
            accepted=self._accepted,
            requests=self._requests,
            gone=self._gone,
            refused=dict(self._refused),
            upstream=self.upstreams.statistics(),
        )

    def in_progress(self) -> dict[str, int]:
        """Return what is drained when the plane stops."""
        return {"requests": self._inflight, "connections": len(self._connections)}

    # ------------------------------------------------------------ called by connections

    @property
    def full(self) -> bool:
        """Whether there are more connections than there may be."""
        return len(self._connections) > self.limits.connections_max

    def opened(self, connection: ClientConnection) -> set[Watched]:
        """A client's connection stands; return its slot in the sweep."""
        self._accepted += 1
        self._connections.add(connection)
        return self.sweep.add(connection)

    def closed(self, connection: ClientConnection) -> None:
        """A client's connection is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._quiet.set()

    def gathers(self, more: int) -> bool:
        """So many bytes more of requests' bodies are in memory; return whether that is allowed."""
        self._bodies_bytes += more
        return more <= 0 or self._bodies_bytes <= self.limits.bodies_bytes_max

    def serve(self, exchange: Exchange) -> None:
        """A request is complete."""
        self._requests += 1
        self._inflight += 1
        if self.draining:
            body = error_body("the router stops; try again", "server_error", code="shutting_down")
            exchange.answer(503, body, headers=((b"retry-after", b"1"),))
        else:
            self._service(exchange)

    def over(self, *, gone: bool) -> None:
        """A request was answered, or its client left."""
        self._inflight -= 1
        self._gone += gone

    def refused(self, status: int) -> None:
        """What a client sent is no request that is served."""
        self._refused[status] = self._refused.get(status, 0) + 1

    # ------------------------------------------------------------ the end

    def _begin_to_drain(self, servers: list[asyncio.Server]) -> None:
        self.draining = True
        for server in servers:
            server.close()
        for connection in tuple(self._connections):
            connection.begin_to_drain()

    async def _no_connection(self, within_s: float) -> None:
        """Wait for the last connection to end, as long as it may take."""
        self._quiet.clear()
        try:
            async with asyncio.timeout(within_s):
                if self._connections:
                    await self._quiet.wait()
        except TimeoutError:
            pass

    async def _end(self) -> None:
        self.upstreams.dials = None
        for connection in tuple(self._connections):
            connection.expire()
        self.upstreams.abort()
        await self._no_connection(self.limits.linger_s)
        for connection in tuple(self._connections):
            connection.abort()
        await self._no_connection(self.limits.linger_s)
        self.sweep.stop()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets.clear()


def _listening(family: int, address: tuple[str, int], *, reuse_port: bool) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)  # noqa: FBT003 - the system's signature
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
