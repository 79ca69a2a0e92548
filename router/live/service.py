"""Watches the fleet for people: samples for the ring, marks, and events for live clients.

Each `SEND_S` two looks are compared for marks, and live clients, if there are any, get the fleet and the newest
decisions; each `RECENT_STEP_S` the fleet's columns go to the ring, compressed on a thread:

    recent    the last `RECENT_S`, every sample that was added
    old       up to `OLD_S`, one sample in `OLD_STEP_S`
    full      beyond `RING_BYTES_MAX` the oldest samples are dropped

A clock that is set back ends the samples that are later than it.

Events are encoded once for all clients. A client's events wait in a queue of `EVENTS_MAX`; with a full queue it does
not read: it is disconnected and counted. Source: HTML, "Server-sent events",
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from indexer.embedded import EmbeddedIndex
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, counter, gauge
from router.decision.policy_store import fields_of
from router.decision.routing import Routing
from router.fleet.registry import SILENT_S
from router.live.fleet import (
    OBSERVED_MAX,
    DecisionFilter,
    Looked,
    Mark,
    Observed,
    fleet_columns,
    marks_of,
    observed,
    rows,
)

CLIENTS_MAX = 16
EVENTS_MAX = 64
COMMENT_S = 15.0
_COMMENT = b": nothing new\n\n"
_END = b""
RECENT_STEP_S, RECENT_S = 5.0, 1800.0
OLD_STEP_S, OLD_S = 60.0, 43_200.0
SEND_S = 1.0
MARKS_MAX = 1000
RING_BYTES_MAX = 32 << 20
"""Kept moments: 12 hours of some hundred ranks."""
_COMPRESSION = 1


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
        self.is_ended = False
        """The router stops, and takes no more clients."""
        self._events = 0
        self.dropped_total = self.refused_total = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def decisions_max(self) -> int:
        """The most decisions a second that a client wants."""
        return max((client.decisions_max for client in self._clients), default=0)

    def is_full(self) -> bool:
        """Return whether a further client is refused, and count it."""
        full = len(self._clients) >= CLIENTS_MAX
        self.refused_total += full
        return full

    @contextmanager
    def connected(self, decisions_max: int, transport: asyncio.Transport | None) -> Iterator[LiveClient]:
        """Connect a client while the context lasts."""
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
        self.is_ended = True
        self._put(_END, list(self._clients))


class Sample(NamedTuple):
    """What was kept of a moment (Unix time)."""

    at_s: float
    data: bytes


class Ring:
    """The samples, in the order of time."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._recent: deque[Sample] = deque()
        self._old: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._old) + len(self._recent)

    def add(self, at_s: float, data: bytes) -> None:
        """Keep a sample; thin and drop others, so that all are within the bounds."""
        for samples in (self._recent, self._old):
            while samples and samples[-1].at_s >= at_s:
                self._forget(samples.pop())
        self._recent.append(Sample(at_s, data))
        self.bytes += len(data)
        while self._recent[0].at_s <= at_s - RECENT_S:
            self._thin(self._recent.popleft())
        while self._old and (self._old[0].at_s <= at_s - OLD_S or self.bytes > self.bytes_max):
            self._forget(self._old.popleft())
        while self._recent and self.bytes > self.bytes_max:
            self._forget(self._recent.popleft())

    def _thin(self, sample: Sample) -> None:
        if not self._old or sample.at_s >= self._old[-1].at_s + OLD_STEP_S:
            self._old.append(sample)
        else:
            self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        self.bytes -= len(sample.data)

    def at(self, at_s: float) -> Sample | None:
        """Return the last sample of that time or earlier; None if all are later."""
        for samples in (self._recent, self._old):
            if samples and samples[0].at_s <= at_s:
                return samples[bisect_right(samples, at_s, key=attrgetter("at_s")) - 1]
        return None

    @property
    def span(self) -> tuple[float, float] | None:
        """The times of the first and of the last sample; None without any."""
        if not self._recent:
            return None
        return next(chain(self._old, self._recent)).at_s, self._recent[-1].at_s

    def steps(self) -> list[tuple[float, float]]:
        """Return how far apart samples are, and since when, for each part that has any."""
        parts = ((RECENT_STEP_S, self._recent), (OLD_STEP_S, self._old))
        return [(step_s, samples[0].at_s) for step_s, samples in parts if samples]


class Live:
    """What is watched of one router; a part of its process."""

    def __init__(
        self, routing: Routing, index: EmbeddedIndex, clock: Clock, *, queued: Callable[[], int] | None = None
    ) -> None:
        """`queued` counts waiting requests, if this process has them."""
        self._routing, self._index, self._clock, self._queued = routing, index, clock, queued
        self._seen = routing.decisions.added_total
        self._last: Looked | None = None
        self._observed, self._observed_changes = dict[WorkerRank, Observed](), 0
        """What decisions showed of their ranks, computed where leases changed since."""
        self.marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self.ring = Ring(RING_BYTES_MAX)
        self.clients = LiveClients()

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set; then live responses end."""
        await until(stop, self._watch())
        self.clients.end()

    async def _watch(self) -> None:
        kept_s = float("-inf")
        while True:
            self.look()
            await self.send()
            now_s = self._clock.now()
            if now_s - kept_s >= RECENT_STEP_S:
                kept_s = now_s
                await self.keep()
            await self._clock.sleep(SEND_S)

    def look(self) -> None:
        """Mark what changed since the last look, and tell live clients of it."""
        last, self._last = self._last, self._looked()
        for mark in marks_of(last, self._last, round(self._clock.wall_ns() / 1e9, 3)):
            self.marks.append(mark)
            self.clients.send("mark", mark)

    async def send(self) -> None:
        """Send live clients the fleet, and the decisions since the last time."""
        decisions, wanted = self._routing.decisions, self.clients.decisions_max
        new, self._seen = decisions.added_total - self._seen, decisions.added_total
        found = rows(self._routing, DecisionFilter(), min(new, wanted)) if new and wanted else []
        if len(self.clients):
            self.clients.send("fleet", await self.fleet())
            if new:
                self.clients.send_decisions(found, new - len(found))

    async def keep(self) -> None:
        """Keep the fleet of this moment in the ring."""
        fleet = await self.fleet()
        data = msgspec.json.encode(fleet)
        self.ring.add(fleet["at_s"], await asyncio.to_thread(zlib.compress, data, _COMPRESSION))

    async def fleet(self) -> dict[str, Any]:
        """Return the fleet's columns now. Each turn of the event loop does a part: requests go on between two."""
        blocks = self._index.block_counts()
        await asyncio.sleep(0)
        trust = self._routing.trust()
        await asyncio.sleep(0)
        if self._observed_changes != self._routing.leases.changes:
            self._observed_changes = self._routing.leases.changes
            self._observed = observed(self._routing.decisions.newest(OBSERVED_MAX))
            await asyncio.sleep(0)
        queued = None if self._queued is None else self._queued()
        return fleet_columns(self._routing, blocks, trust, self._observed, queued)

    def fleet_at(self, at_s: float) -> bytes | None:
        """Return the last columns that were kept at that time or before, as JSON; None: all are later."""
        sample = self.ring.at(at_s)
        return None if sample is None else zlib.decompress(sample.data)

    def _looked(self) -> Looked:
        fleet, now_s = self._routing.state.fleet, self._clock.now()
        return Looked(
            workers={
                each.registration.worker_id: (
                    each.registration.instance,
                    each.draining,
                    each.heard_at_s is not None and fleet.is_log_connected and now_s >= each.heard_at_s + SILENT_S,
                )
                for each in fleet.workers()
            },
            trust=self._routing.trust(),
            resyncs=self._index.resyncs(),
            policy=fields_of(self._routing.policy),
            is_log_connected=fleet.is_log_connected,
        )


def live_families(clients: LiveClients, ring: Ring) -> Iterator[Family]:
    """Yield the clients of live streams, and the memory of the fleet's past."""
    yield gauge("live_clients", "Clients of the live stream", rows=[((), len(clients))])
    yield gauge("live_history_bytes", "Kept moments of the fleet, compressed", rows=[((), ring.bytes)])
    for name, meaning, count in (
        ("live_dropped", "Live clients that were disconnected because they did not read", clients.dropped_total),
        ("live_refused", "Live clients that were refused: too many were connected", clients.refused_total),
    ):
        yield counter(name, meaning, rows=[((), count)])
