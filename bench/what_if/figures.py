"""Figures of played policies, their intervals, and their differences from the policy in force.

hit rate      cached prompt tokens / prompt tokens
imbalance     most uncached tokens of a rank in the mean of all ranks, in windows of 10 s; the mean over the windows
requests/s    from the first arrival to the last end

Each interval is a bootstrap: the requests in `BLOCKS` blocks of equal number in the order of arrival, drawn with
replacement `DRAWS` times with `SEED`; the 2.5th to the 97.5th percentile. All policies are drawn alike, so that the
interval of a difference is that of the same requests under both. It says how much the requests differ, not how well the
simulation fits: the row `recorded` and the row of the policy in force show that.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.report import WINDOW_S
from bench.what_if.play import Floats, Played
from kv_protocol.splitmix import choice_index, splitmix64

BLOCKS, DRAWS, SEED = 40, 400, 1
RATE_WINDOWS_MAX = 1000
_INTERVAL = (2.5, 97.5)


class Estimate(NamedTuple):
    """A figure, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_below_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.high < 0

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.low > 0


class PolicyFigures(NamedTuple):
    """One policy. Times in seconds; `user_tokens_per_s` is 1 / mean ITL."""

    hit_rate: Estimate
    ttft_mean_s: Estimate
    ttft_p50_s: Estimate
    ttft_p99_s: Estimate
    itl_mean_s: Estimate
    imbalance: Estimate
    requests_per_s: Estimate


class Gains(NamedTuple):
    """A policy minus the policy in force, of the same requests."""

    hit_rate: Estimate
    ttft_mean_s: Estimate
    ttft_p99_s: Estimate
    itl_mean_s: Estimate


Statistic = Callable[[Played, NDArray[np.intp]], float]
"""A figure of the requests at these places, which ascend block by block."""


def _hit_rate(run: Played, at: NDArray[np.intp]) -> float:
    return float(run.cached_tokens[at].sum() / run.isl_tokens[at].sum())


def _ttft_mean(run: Played, at: NDArray[np.intp]) -> float:
    return float(run.ttft_s[at].mean())


def _ttft_p50(run: Played, at: NDArray[np.intp]) -> float:
    return float(np.quantile(run.ttft_s[at], 0.5))


def _ttft_p99(run: Played, at: NDArray[np.intp]) -> float:
    return float(np.quantile(run.ttft_s[at], 0.99))


def _itl_mean(run: Played, at: NDArray[np.intp]) -> float:
    known = run.itl_s[at]
    known = known[known > 0]
    return float(known.mean()) if len(known) else 0.0


def figures(run: Played, ranks: int) -> PolicyFigures:
    """Return the figures of a run on so many ranks."""
    return PolicyFigures(
        hit_rate=_estimate(_hit_rate, run),
        ttft_mean_s=_estimate(_ttft_mean, run),
        ttft_p50_s=_estimate(_ttft_p50, run),
        ttft_p99_s=_estimate(_ttft_p99, run),
        itl_mean_s=_estimate(_itl_mean, run),
        imbalance=_imbalance(run, ranks),
        requests_per_s=_rate(run),
    )


def gains(run: Played, before: Played) -> Gains:
    """Return how a run differs from another one of the same requests."""
    return Gains(
        hit_rate=_difference(_hit_rate, run, before),
        ttft_mean_s=_difference(_ttft_mean, run, before),
        ttft_p99_s=_difference(_ttft_p99, run, before),
        itl_mean_s=_difference(_itl_mean, run, before),
    )


def _estimate(statistic: Statistic, run: Played) -> Estimate:
    count = len(run.ttft_s)
    return _interval(statistic(run, np.arange(count)), [statistic(run, at) for at in drawn(count)])


def _difference(statistic: Statistic, run: Played, before: Played) -> Estimate:
    every = np.arange(len(run.ttft_s))
    drawn_differences = [statistic(run, at) - statistic(before, at) for at in drawn(len(every))]
    return _interval(statistic(run, every) - statistic(before, every), drawn_differences)


def _imbalance(run: Played, ranks: int) -> Estimate:
    window = (run.arrival_s // WINDOW_S).astype(np.int64)
    ratios = list[float]()
    for each in np.unique(window):
        at = window == each
        tokens = np.bincount(run.worker[at], (run.isl_tokens - run.cached_tokens)[at], minlength=ranks)
        if tokens.sum():
            ratios.append(float(tokens.max() * ranks / tokens.sum()))
    known = np.array(ratios or [1.0])
    return _interval(float(known.mean()), [float(known[at].mean()) for at in drawn(len(known))])


def _rate(run: Played) -> Estimate:
    """Return the requests a second, from the first arrival to the last end.

    The interval is drawn from windows of equal length, `RATE_WINDOWS_MAX` at most, each of a second or longer.
    """
    began_s, span_s = float(run.arrival_s.min()), max(float(run.end_s.max() - run.arrival_s.min()), 1e-9)
    windows = min(max(1, int(np.ceil(span_s))), RATE_WINDOWS_MAX)
    window = ((run.end_s - began_s) * (windows / span_s)).astype(np.int64)
    ends = np.bincount(np.minimum(window, windows - 1), minlength=windows)
    rates = [float(ends[at].mean()) * windows / span_s for at in drawn(windows)]
    return _interval(len(run.end_s) / span_s, rates)


def _interval(value: float, means: Sequence[float]) -> Estimate:
    low, high = np.percentile(means, _INTERVAL).tolist()
    return Estimate(value, low, high)


@lru_cache(maxsize=4)
def drawn(count: int) -> list[NDArray[np.intp]]:
    """Return the places of the requests of each draw, out of `count`."""
    blocks = np.array_split(np.arange(count, dtype=np.int32), min(BLOCKS, count))
    numbers = range(len(blocks))
    return [
        np.concatenate([blocks[choice_index(splitmix64(SEED + draw), len(blocks), at)] for at in numbers])
        for draw in range(DRAWS)
    ]


def frontier(points: dict[str, tuple[float, float]]) -> set[str]:
    """Return the names of points that no other one beats in both values, of which less is better."""
    return {
        name
        for name, (x, y) in points.items()
        if not any((a <= x and b <= y and (a, b) != (x, y)) for a, b in points.values())
    }


def of_recorded(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return mean, p50 and p99 of measured times; None of none."""
    if not values:
        return None
    found: Floats = np.array(values)
    return float(found.mean()), float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99))
