"""Keeps a router's past for people: after each `STEP_S` the fleet's columns go to a ring, a row of sums to the trends.

ring      has the columns, compressed on a thread. When the clock is set back, samples of later times are dropped

    recent    every sample of the last `RECENT_S`
    old       one sample in each `OLD_STEP_S` of the time before that, up to `OLD_S` ago
    full      beyond `RING_BYTES_MAX` the oldest samples are dropped

trends    `STEPS` rows: what was added to the sums of the metrics in a step, and two gauges at the step's end. Steps
          end at multiples of `STEP_S` of Unix time, so rows of several processes have the same times
"""

import asyncio
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from operator import sub
from typing import Any

import msgspec

from indexer.embedded import EmbeddedIndex
from kv_runtime.telemetry import Family, gauge
from router.decision.routing import Routing
from router.live.fleet import OBSERVED_MAX, fleet_columns, observed

STEP_S, STEPS = 5, 180
SAVED = ("prompt_tokens", "reused_tokens", "baseline_tokens", "saved_s", "baseline_s")
"""The columns of a row that are differences of `Figures` (`router/attribution/report.py`)."""
RECENT_S = 1800.0
OLD_STEP_S, OLD_S = 60.0, 43_200.0
RING_BYTES_MAX = 32 << 20
"""Enough for 12 hours of some hundred ranks."""
_COMPRESSION = 1


class Ring:
    """The columns of the fleet, compressed, at some moments."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.samples: dict[float, bytes] = {}
        """By Unix time, in the order of time."""

    @property
    def size(self) -> int:
        """The bytes of all samples."""
        return sum(map(len, self.samples.values()))

    def add(self, at_s: float, data: bytes) -> None:
        """Keep a sample; thin and drop others, so that all are within the bounds."""
        kept, next_s = dict[float, bytes](), at_s - OLD_S
        for each, sample in self.samples.items():
            if at_s - OLD_S < each < at_s and (each > at_s - RECENT_S or each >= next_s):
                kept[each] = sample
                next_s = each + OLD_STEP_S
        self.samples = {**kept, at_s: data}
        while self.size > self.bytes_max:
            del self.samples[next(iter(self.samples))]

    def at(self, at_s: float) -> bytes | None:
        """Return the last sample of that time or earlier; None if all are later."""
        last_s = max((each for each in self.samples if each <= at_s), default=None)
        return None if last_s is None else self.samples[last_s]

    def shown(self) -> dict[str, Any]:
        """Return how much is kept, from when to when, and the step of the recent and of the old samples."""
        times = [*self.samples]
        recent = [at_s for at_s in times if at_s > times[-1] - RECENT_S]
        parts = {STEP_S: recent, OLD_STEP_S: times[: len(times) - len(recent)]}
        return {
            "from_s": times[0] if times else None,
            "to_s": times[-1] if times else None,
            "samples": len(times),
            "bytes": self.size,
            "bytes_max": self.bytes_max,
            "steps": [{"step_s": step_s, "from_s": part[0]} for step_s, part in parts.items() if part],
        }


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was added to sums in a step, and two gauges (the last two fields) at the step's end.

    first_tokens  how many came, by bucket of `ttft_bounds_s`; the last bucket has no bound
    baseline_*    what workers drawn evenly would have reused and saved
    event_lag_s   the largest age of a rank's newest applied events
    """

    at_s: int = 0
    requests: int = 0
    first_tokens: list[int] = []
    prompt_tokens: int = 0
    reused_tokens: int = 0
    baseline_tokens: float = 0.0
    saved_s: float = 0.0
    baseline_s: float = 0.0
    in_flight: int = 0
    event_lag_s: float | None = None


class TrendsPage(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/trends`."""

    step_s: int
    ttft_bounds_s: tuple[float, ...]
    rows: list[Row]


def merged_trends(shown: Sequence[TrendsPage]) -> TrendsPage:
    """Return the rows of all processes by time: additions are summed; a gauge has the largest value of all."""
    found = defaultdict[int, list[Row]](list)
    for row in (row for each in shown for row in each.rows):
        found[row.at_s].append(row)
    merged = [
        Row(
            at_s=at_s,
            first_tokens=[*map(sum, zip(*(row.first_tokens for row in rows), strict=True))],
            **{name: sum(getattr(row, name) for row in rows) for name in ("requests", *SAVED)},
            in_flight=max(row.in_flight for row in rows),
            event_lag_s=max((row.event_lag_s for row in rows if row.event_lag_s is not None), default=None),
        )
        for at_s, rows in sorted(found.items())
    ]
    return msgspec.structs.replace(shown[0], rows=merged[-STEPS:])


class Live:
    """Shows the fleet of one router, and keeps its past; a part of its process."""

    def __init__(
        self,
        routing: Routing,
        index: EmbeddedIndex,
        read: Callable[[], Row],
        ttft_bounds_s: tuple[float, ...],
        *,
        queued: Callable[[], int] | None = None,
    ) -> None:
        """`queued` counts waiting requests, if this process has them.

        `read` returns the sums since the start; `ttft_bounds_s` are the bounds of the buckets of first tokens.
        """
        self._routing, self._index, self._queued, self.clock = routing, index, queued, routing.clock
        self.ring = Ring(RING_BYTES_MAX)
        self._read, self._before = read, read()
        self._bounds, self._rows = ttft_bounds_s, deque[Row](maxlen=STEPS)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the fleet now and at the end of each step, and a row of each step, until `stop` is set."""
        while not stop.is_set():
            await self.keep()
            await self.clock.wait(stop, STEP_S - self.clock.wall_ns() / 1e9 % STEP_S)
            self.step()

    def step(self) -> None:
        """End a step: add its row."""
        before, self._before = self._before, self._read()
        row = msgspec.structs.replace(
            self._before,
            at_s=round(self.clock.wall_ns() / 1e9 / STEP_S) * STEP_S,
            first_tokens=[*map(sub, self._before.first_tokens, before.first_tokens)],
            **{name: getattr(self._before, name) - getattr(before, name) for name in ("requests", *SAVED)},
        )
        self._rows.append(row)

    def trends(self) -> TrendsPage:
        """Return the rows."""
        return TrendsPage(STEP_S, self._bounds, list(self._rows))

    async def keep(self) -> None:
        """Keep the fleet of this moment in the ring."""
        fleet = await self.fleet()
        data = msgspec.json.encode(fleet)
        self.ring.add(fleet["at_s"], await asyncio.to_thread(zlib.compress, data, _COMPRESSION))

    async def fleet(self) -> dict[str, Any]:
        """Return the fleet's columns now. Each turn of the event loop does a part: requests get turns in between."""
        blocks = self._index.block_counts()
        await asyncio.sleep(0)
        trust = self._routing.trust()
        await asyncio.sleep(0)
        seen = observed(self._routing.decisions.newest(OBSERVED_MAX))
        await asyncio.sleep(0)
        queued = None if self._queued is None else self._queued()
        return fleet_columns(self._routing, blocks, trust, seen, queued)

    def families(self) -> Iterator[Family]:
        """Yield the memory of the fleet's past."""
        yield gauge("live_history_bytes", "Kept moments of the fleet, compressed", rows=[((), self.ring.size)])
