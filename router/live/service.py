"""Watches the fleet for people: samples for the ring, marks, and events for live clients.

Each `SEND_S` two looks are compared for marks; then each live client gets the marks, the fleet, and the decisions since
its last look. Each `RECENT_STEP_S` the fleet's columns go to the ring, compressed on a thread:

    recent    the last `RECENT_S`, every sample that was added
    old       up to `OLD_S`, one sample in `OLD_STEP_S`
    full      beyond `RING_BYTES_MAX` the oldest samples are dropped

A clock that is set back ends the samples that are later than it.

Nothing waits for a client: one that is slow gets at once what it missed. Source: HTML, "Server-sent events",
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain, count, islice
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

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
SLOW_S = 30.0
"""How long a live client may take to read an event; then it is disconnected."""
RECENT_STEP_S, RECENT_S = 5.0, 1800.0
OLD_STEP_S, OLD_S = 60.0, 43_200.0
SEND_S = 1.0
MARKS_MAX = 1000
RING_BYTES_MAX = 32 << 20
"""Kept moments: 12 hours of some hundred ranks."""
_COMPRESSION = 1


class Sample(NamedTuple):
    """What was kept of a moment (Unix time)."""

    at_s: float
    data: bytes


class Ring:
    """The samples, in the order of time."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._recent: deque[Sample] = deque()
        self._old: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._old) + len(self._recent)

    @property
    def size(self) -> int:
        """The bytes of all samples."""
        return sum(len(each.data) for each in chain(self._old, self._recent))

    def add(self, at_s: float, data: bytes) -> None:
        """Keep a sample; thin and drop others, so that all are within the bounds."""
        for samples in (self._recent, self._old):
            while samples and samples[-1].at_s >= at_s:
                samples.pop()
        self._recent.append(Sample(at_s, data))
        while self._recent[0].at_s <= at_s - RECENT_S:
            sample = self._recent.popleft()
            if not self._old or sample.at_s >= self._old[-1].at_s + OLD_STEP_S:
                self._old.append(sample)
        while self._old and (self._old[0].at_s <= at_s - OLD_S or self.size > self.bytes_max):
            self._old.popleft()
        while self._recent and self.size > self.bytes_max:
            self._recent.popleft()

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
        self._last: Looked | None = None
        self._observed, self._observed_changes = dict[WorkerRank, Observed](), 0
        """What decisions showed of their ranks, computed where leases changed since."""
        self.marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self.ring = Ring(RING_BYTES_MAX)
        self.is_ended = False
        """The router stops, and takes no more clients."""
        self.clients = self.dropped_total = self.refused_total = 0
        self._marked, self._looked, self._fleet, self._ids = 0, asyncio.Event(), b"", count(1)

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set; then live responses end."""
        await until(stop, self._watch())
        self.end()

    def end(self) -> None:
        """End live responses, and take no more clients."""
        self.is_ended = True
        self._looked.set()

    async def _watch(self) -> None:
        kept_s = float("-inf")
        while True:
            await self.look()
            now_s = self._clock.now()
            if now_s - kept_s >= RECENT_STEP_S:
                kept_s = now_s
                await self.keep()
            await self._clock.sleep(SEND_S)

    async def look(self) -> None:
        """Mark what changed since the last look, and let live clients go on."""
        last, self._last = self._last, self._looked_at()
        new = marks_of(last, self._last, round(self._clock.wall_ns() / 1e9, 3))
        self.marks += new
        self._marked += len(new)
        if self.clients:
            self._fleet = self.event("fleet", await self.fleet())
        self._looked.set()
        self._looked = asyncio.Event()

    def is_full(self) -> bool:
        """Return whether a further client is refused, and count it."""
        is_full = self.clients >= CLIENTS_MAX
        self.refused_total += is_full
        return is_full

    async def events(self, decisions_max: int) -> AsyncIterator[bytes]:
        """Yield the events of a live client after each look, until the end."""
        decisions, marked, seen = self._routing.decisions, self._marked, self._routing.decisions.added_total
        while True:
            await self._looked.wait()
            if self.is_ended:
                return
            new, marked = self._marked - marked, self._marked
            for mark in islice(self.marks, max(0, len(self.marks) - new), None):
                yield self.event("mark", mark)
            yield self._fleet
            new, seen = decisions.added_total - seen, decisions.added_total
            if new:
                found = rows(self._routing, DecisionFilter(), min(new, decisions_max)) if decisions_max else []
                yield self.event("decisions", {"decisions": found, "skipped": new - len(found)})

    def event(self, kind: str, value: object) -> bytes:
        """Return an event with the next id."""
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (next(self._ids), kind.encode(), msgspec.json.encode(value))

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

    def _looked_at(self) -> Looked:
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

    def families(self) -> Iterator[Family]:
        """Yield the clients of live streams, and the memory of the fleet's past."""
        yield gauge("live_clients", "Clients of the live stream", rows=[((), self.clients)])
        yield gauge("live_history_bytes", "Kept moments of the fleet, compressed", rows=[((), self.ring.size)])
        for name, meaning, total in (
            ("live_dropped", "Live clients that were disconnected because they did not read", self.dropped_total),
            ("live_refused", "Live clients that were refused: too many were connected", self.refused_total),
        ):
            yield counter(name, meaning, rows=[((), total)])
