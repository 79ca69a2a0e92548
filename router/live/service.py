"""The fleet's columns, now and before: each `RECENT_STEP_S` they go to a ring, compressed on a thread.

    recent    the last `RECENT_S`, every sample that was added
    old       up to `OLD_S`, one sample in `OLD_STEP_S`
    full      beyond `RING_BYTES_MAX` the oldest samples are dropped

A clock that is set back ends the samples that are later than it.
"""

import asyncio
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from indexer.embedded import EmbeddedIndex
from kv_runtime.telemetry import Family, gauge
from router.decision.routing import Routing
from router.live.fleet import OBSERVED_MAX, fleet_columns, observed

RECENT_STEP_S, RECENT_S = 5.0, 1800.0
OLD_STEP_S, OLD_S = 60.0, 43_200.0
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
    """Shows the fleet of one router, and keeps its past; a part of its process."""

    def __init__(self, routing: Routing, index: EmbeddedIndex, *, queued: Callable[[], int] | None = None) -> None:
        """`queued` counts waiting requests, if this process has them."""
        self._routing, self._index, self._queued, self.clock = routing, index, queued, routing.clock
        self.ring = Ring(RING_BYTES_MAX)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the fleet every `RECENT_STEP_S` until `stop` is set."""
        while not stop.is_set():
            await self.keep()
            await self.clock.wait(stop, RECENT_STEP_S)

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
        seen = observed(self._routing.decisions.newest(OBSERVED_MAX))
        await asyncio.sleep(0)
        queued = None if self._queued is None else self._queued()
        return fleet_columns(self._routing, blocks, trust, seen, queued)

    def fleet_at(self, at_s: float) -> bytes | None:
        """Return the last columns that were kept at that time or before, as JSON; None: all are later."""
        sample = self.ring.at(at_s)
        return None if sample is None else zlib.decompress(sample.data)

    def families(self) -> Iterator[Family]:
        """Yield the memory of the fleet's past."""
        yield gauge("live_history_bytes", "Kept moments of the fleet, compressed", rows=[((), self.ring.size)])
