"""The last 15 minutes in steps: rates, latencies, reuse, what routing saved. Fixed memory; a request costs nothing.

GET /v1/trends      one row a step, oldest first; with `router --processes` the sums of all

A row has what was added to the sums of the metrics since the row before, and two gauges of its end. Steps end at
multiples of `STEP_S` of Unix time, so rows of several processes have the same times.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from aiohttp import web

from kv_runtime.clock import Clock
from kv_runtime.http.answers import json_response
from kv_runtime.supervise import until
from router.attribution.contents import Figures

STEP_S, STEPS = 5, 180
_SAVED = ("prompt_tokens", "reused_tokens", "baseline_tokens", "saved_s", "baseline_s")
"""The columns of a row that are differences of `Figures`."""


class Gauges(NamedTuple):
    """Requests in flight, and the largest age of a rank's newest events when they were applied."""

    in_flight: int
    event_lag_s: float | None


class Row(msgspec.Struct, frozen=True):
    """One step. `first_tokens`: how many came, by bucket of `ttft_bounds_s`; the last bucket has no bound.

    baseline_*    what workers drawn evenly would have reused and saved
    """

    at_s: int
    requests: int
    first_tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    baseline_tokens: float
    saved_s: float
    baseline_s: float
    in_flight: int
    event_lag_s: float | None


class TrendsPage(msgspec.Struct, frozen=True):
    """The answer of the endpoint."""

    step_s: int
    ttft_bounds_s: tuple[float, ...]
    rows: list[Row]


class Trends:
    """The rows of one process; a part of it."""

    def __init__(
        self,
        clock: Clock,
        arrived: Callable[[], tuple[int, list[int]]],
        saved: Callable[[], Figures],
        gauges: Callable[[], Gauges],
        ttft_bounds_s: tuple[float, ...],
    ) -> None:
        """`ttft_bounds_s`: of the buckets of first tokens.

        `arrived` returns how many requests were read, and how many first tokens came; `saved` what reuse saved.
        """
        self._clock, self._arrived, self._saved, self._gauges = clock, arrived, saved, gauges
        self._bounds = ttft_bounds_s
        self._rows = deque[Row](maxlen=STEPS)
        self._before = (arrived(), saved())

    async def run(self, stop: asyncio.Event) -> None:
        """Add a row at the end of each step until `stop` is set."""
        await until(stop, self._watch())

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(STEP_S - self._clock.wall_ns() / 1e9 % STEP_S)
            self.step()

    def step(self) -> None:
        """Add a row."""
        (requests, tokens), saved = now = (self._arrived(), self._saved())
        (requests_before, tokens_before), saved_before = self._before
        gauges, self._before = self._gauges(), now
        row = Row(
            at_s=round(self._clock.wall_ns() / 1e9 / STEP_S) * STEP_S,
            requests=requests - requests_before,
            first_tokens=[count - before for count, before in zip(tokens, tokens_before, strict=True)],
            **{name: getattr(saved, name) - getattr(saved_before, name) for name in _SAVED},
            in_flight=gauges.in_flight,
            event_lag_s=gauges.event_lag_s,
        )
        self._rows.append(row)

    def shown(self) -> TrendsPage:
        """Return the rows."""
        return TrendsPage(STEP_S, self._bounds, list(self._rows))

    def routes(self) -> list[web.RouteDef]:
        """Return the route, for an application to add."""

        async def show(_: web.Request) -> web.Response:
            return json_response(self.shown())

        return [web.get("/v1/trends", show)]


def merged_trends(shown: Sequence[TrendsPage]) -> TrendsPage:
    """Return the rows of all processes by their times: sums of what was added, the largest gauges: all know them."""
    rows = dict[int, list[Row]]()
    for row in (row for each in shown for row in each.rows):
        rows.setdefault(row.at_s, []).append(row)
    merged = [_merged(found) for _, found in sorted(rows.items())]
    return msgspec.structs.replace(shown[0], rows=merged[-STEPS:])


def _merged(rows: Sequence[Row]) -> Row:
    return Row(
        at_s=rows[0].at_s,
        requests=sum(row.requests for row in rows),
        first_tokens=[sum(counts) for counts in zip(*(row.first_tokens for row in rows), strict=True)],
        **{name: sum(getattr(row, name) for row in rows) for name in _SAVED},
        in_flight=max(row.in_flight for row in rows),
        event_lag_s=max((row.event_lag_s for row in rows if row.event_lag_s is not None), default=None),
    )
