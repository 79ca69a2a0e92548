"""Figures of a run, and the machine that they were measured on."""

import math
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

from bench.streaming_client import Measured

WINDOW_S = 10.0
LAG_LIMIT_S = 0.010


class ShownFigures(NamedTuple):
    """What a table shows of one run. Times in simulated milliseconds, hit rate and imbalance as ratios."""

    requests: int
    errors: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_saved: int
    imbalance: float
    exact_predictions: int


def figures(measured: Sequence[Measured], *, speed: float, block_size: int) -> ShownFigures:
    """Return the figures of one run at `speed` simulated seconds a second."""
    answered = [each for each in measured if not each.error]
    ttfts_ms = [each.ttft_s * speed * 1000 for each in answered]
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    cached_tokens = sum(each.cached_tokens for each in answered)
    return ShownFigures(
        requests=len(measured),
        errors=len(measured) - len(answered),
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        ttft_p50_ms=percentile(ttfts_ms, 0.50),
        ttft_p99_ms=percentile(ttfts_ms, 0.99),
        tokens_saved=cached_tokens,
        imbalance=imbalance(
            [(each.sent_s, each.worker, each.prompt_tokens - each.cached_tokens) for each in answered],
            workers=len({each.worker for each in answered}),
        ),
        exact_predictions=sum(each.predicted_blocks * block_size == each.cached_tokens for each in answered),
    )


def percentile(values: Sequence[float], quantile: float) -> float:
    """Return the value below which a share `quantile` of the values lies (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


def lag_counts(exposition: str) -> Counter[float]:
    """Return the cumulative counts of a process's event-loop lag, by bucket's upper bound in seconds."""
    counts: Counter[float] = Counter()
    for line in exposition.splitlines():
        if line.startswith("kvrouter_event_loop_lag_seconds_bucket{le="):
            bound, _, count = line.partition('le="')[2].partition('"} ')
            counts[float(bound)] = int(float(count))
    return counts


def lag_p99_s(before: Counter[float], after: Counter[float]) -> float:
    """Return the upper bound of the bucket that holds the 99th percentile of what was observed in between."""
    total = after[math.inf] - before[math.inf]
    return min((bound for bound in after if after[bound] - before[bound] >= 0.99 * total), default=0.0)


def imbalance(requests: Iterable[tuple[float, str | int, int]], *, workers: int) -> float:
    """Return the most uncached tokens of a worker over the mean of all `workers`, averaged over windows; 1.0 is even.

    A request is its time in seconds, its worker and its uncached tokens; windows of `WINDOW_S` without them do not
    count.
    """
    windows: defaultdict[int, Counter[str | int]] = defaultdict(Counter)
    for at_s, worker, uncached_tokens in requests:
        windows[int(at_s // WINDOW_S)][worker] += uncached_tokens
    ratios = [max(tokens.values()) * workers / tokens.total() for tokens in windows.values() if tokens.total()]
    return sum(ratios) / len(ratios) if ratios else 1.0


def machine_line() -> str:
    """Return one line about this machine."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"
