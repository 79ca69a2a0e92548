"""Clients of the live stream: server-sent events, each encoded once for all of them.

A client's events wait in a queue of `EVENTS_MAX`. A client with a full queue does not read: it is disconnected
and counted.
Source: HTML, "Server-sent events", https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web

CLIENTS_MAX = 16
EVENTS_MAX = 64
COMMENT_S = 15.0
_COMMENT = b": nothing new\n\n"
_END = b""


class TooManyClients(Exception):
    """`CLIENTS_MAX` clients are connected."""


class NoMoreClients(Exception):
    """The router stops, and takes no more clients."""


class LiveClient:
    """One connected client, and how many decisions a second it wants."""

    def __init__(self, decisions_max: int, transport: asyncio.Transport | None) -> None:
        self.decisions_max = decisions_max
        self._events: asyncio.Queue[bytes] = asyncio.Queue(EVENTS_MAX)
        self._transport = transport
        self.is_dropped = False

    def put(self, event: bytes) -> bool:
        """Queue an event; return False if the client was disconnected instead."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self.is_dropped = True
            if self._transport is not None:
                self._transport.abort()
            return False
        return True

    async def send_to(self, response: web.StreamResponse) -> None:
        """Write events as they come, and a comment when none came for `COMMENT_S`, until the end or a disconnection."""
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), COMMENT_S)
            except TimeoutError:
                event = _COMMENT
            if event == _END:
                return
            await response.write(event)


class LiveClients:
    """All connected clients."""

    def __init__(self) -> None:
        self._clients: set[LiveClient] = set()
        self._is_ended = False
        self._events = 0
        self.dropped_total = self.refused_total = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def decisions_max(self) -> int:
        """The most decisions a second that a client wants."""
        return max((client.decisions_max for client in self._clients), default=0)

    @contextmanager
    def connected(self, decisions_max: int, transport: asyncio.Transport | None) -> Iterator[LiveClient]:
        """Connect a client while the context lasts; raise `TooManyClients`, or `NoMoreClients` after the end."""
        if self._is_ended or len(self._clients) >= CLIENTS_MAX:
            self.refused_total += 1
            raise NoMoreClients if self._is_ended else TooManyClients
        client = LiveClient(decisions_max, transport)
        self._clients.add(client)
        try:
            yield client
        finally:
            self._clients.discard(client)

    def send(self, kind: str, value: object) -> None:
        """Send an event to all clients."""
        self._put(self.encoded(kind, value), list(self._clients))

    def send_decisions(self, rows: Sequence[object], skipped: int) -> None:
        """Send each client as many rows as it wants; its event counts the rows that it does not get, with `skipped`."""
        for wanted in {client.decisions_max for client in self._clients}:
            shown = rows[:wanted]
            value = {"decisions": shown, "skipped": skipped + len(rows) - len(shown)}
            clients = [client for client in self._clients if client.decisions_max == wanted]
            self._put(self.encoded("decisions", value), clients)

    def encoded(self, kind: str, value: object) -> bytes:
        """Return an event with the next id."""
        self._events += 1
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self._events, kind.encode(), msgspec.json.encode(value))

    def _put(self, event: bytes, clients: list[LiveClient]) -> None:
        for client in clients:
            if not client.is_dropped and not client.put(event):
                self.dropped_total += 1

    def end(self) -> None:
        """End all responses, and take no more clients."""
        self._is_ended = True
        self._put(_END, list(self._clients))
