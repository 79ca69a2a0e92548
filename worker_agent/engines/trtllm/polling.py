"""Polls TensorRT-LLM: fetches that do not wait, with pauses after empty ones.

    fetch             always with timeout 0. With a timeout the RPC worker sleeps 100 ms after each empty fetch, however
                      soon rows come
    empty fetch       a pause, which grows until rows come: 5 to 20 ms for KV events, 10 to 100 ms for statistics. So
                      immediate empty answers, for whatever reason, do not cause busy polling
    time is up        the caller gets no rows

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/executor/rpc_worker_mixin.py` (`fetch_kv_cache_events_wait_async`,
`fetch_stats_wait_async`: 100 ms) and `tensorrt_llm/executor/executor.py` (`get_stats` answers at once before the first
request); the pauses: `docs/SOURCES.md` D6.5.
"""

import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Pauses = tuple[float, float, float]
"""The shortest and the longest, in seconds, and how many times as long as the one before it each is."""

EVENT_PAUSES = (0.005, 0.020, 1.5)
STATISTICS_PAUSES = (0.010, 0.100, 2.0)


class RowPoller:
    """One kind of rows, polled by one thread. The pause that was reached lasts from call to call."""

    def __init__(
        self,
        pauses: Pauses,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shortest_s, self._longest_s, self._growth = pauses
        self._pause_s = self._shortest_s
        self._now_s, self._sleep = now_s, sleep

    def rows(self, fetch: Callable[[], list[Row]], timeout_s: float) -> list[Row]:
        """Return the first rows of `fetch`, or none after `timeout_s`; raise what it raises."""
        end_s = self._now_s() + timeout_s
        while not (rows := fetch()):
            left_s = end_s - self._now_s()
            if left_s <= 0:
                return []
            self._sleep(min(self._pause_s, left_s))
            self._pause_s = min(self._pause_s * self._growth, self._longest_s)
        self._pause_s = self._shortest_s
        return rows
