"""Learns for each rank how TTFT and ITL depend on prompt, cache and load.

    TTFT = a + b * uncached tokens + c * queued prefill tokens + d * running requests
    ITL  = a + b * running requests + c * active blocks

Coefficients begin as those of one H200 (`TTFT`, `ITL`) and are learnt by recursive least squares with forgetting, each
rank's by itself. With features x, coefficients w, their covariance P, and a measurement s that is known to `NOISE`:

    r = (NOISE * max(w.x, FLOOR_S))^2       the spread of single measurements grows with what is measured
    v = x'Px + r                            that of this measurement
    e = s - w.x, at most OUTLIER * sqrt(v)  one stray measurement moves little
    w = max(0, w + Px e / v)                more work never makes an answer earlier, so that no prediction is negative
    P = D (P - Px x'P / v) D                D = 1 / sqrt(FORGETTING) for each coefficient, less where its variance would
                                            exceed VARIANCE_MAX: of a feature that never varies nothing is learnt, and
                                            that must not grow for ever. It is at least VARIANCE_MIN: learning goes on

Features are scaled to the order of 1 within. Arithmetic is Python's, term by term in a fixed order: the same
measurements in the same order give the same bits.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from router.fleet.rank_table import RankTable
from router.journal.checkpoint_rows import FitRow

FORGETTING = 0.99
"""The weight of a measurement halves with every 69 that follow."""
NOISE = 0.2
"""Relative; the median error of the prior's line against the measurements that it was drawn through."""
FLOOR_S = 1e-3
OUTLIER = 3.0
UNCERTAINTY = 3.0
"""Of the prior's coefficients, as a multiple of each; so much may another engine, or another model, differ."""
VARIANCE_MAX, VARIANCE_MIN = 1e4, 1e-6
"""Of the prior's variances."""
SECONDS_MAX = 600.0
FEATURE_MAX = 1e9

Column = NDArray[np.float64] | NDArray[np.int64] | float


class Law(NamedTuple):
    """The prior: seconds per unit of each feature, and a usual amount of each."""

    coefficients: tuple[float, ...]
    scales: tuple[float, ...]


TTFT = Law((17.0e-3, 24.4e-6, 24.4e-6, 48e-6), (1.0, 4096.0, 4096.0, 64.0))
"""Constant, uncached tokens, queued prefill tokens, running requests.

Source: relative least squares through the TTFT rows of `captures/h200_calibration.json` (vLLM 0.24.0, Qwen3-8B
dimensions, 128..32768 tokens): 17.0 ms + 24.4 us a token, median error 20 %, worst 50 % (attention is not linear).
Queued tokens are computed before, at the same price. A running request adds what it adds to an iteration (`ITL`).
"""
ITL = Law((5.52e-3, 12.7e-6, 1.11e-6), (1.0, 64.0, 4096.0))
"""Constant, running requests, active blocks.

Source: the same capture's ITL rows (batch 1..256 at 1024 tokens), of which reading K/V takes 34.7 ns a token
(`worker_agent/engines/simulated/timing.py`): the rest is 5.52 ms + 12.7 us a request, worst error 8.5 %. A block
is taken to have 32 tokens.
"""


class _Fit:
    """One rank's coefficients of the scaled features, and their covariance."""

    __slots__ = ("covariance", "weights")

    def __init__(self, law: Law) -> None:
        self.weights = [each * scale for each, scale in zip(law.coefficients, law.scales, strict=True)]
        self.covariance = [
            [variance if row == column else 0.0 for column in range(len(law.scales))]
            for row, variance in enumerate(prior_variances(law))
        ]


def prior_variances(law: Law) -> list[float]:
    """Return the variances of the law's scaled coefficients."""
    return [(UNCERTAINTY * each * scale) ** 2 for each, scale in zip(law.coefficients, law.scales, strict=True)]


def _dot(left: list[float], right: list[float]) -> float:
    total = 0.0
    for each, other in zip(left, right, strict=True):
        total += each * other
    return total


class LatencyModel:
    """One law, fitted to each rank. A pure fold over the measurements, in their order."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self._variances = prior_variances(law)
        self._fits: dict[WorkerRank, _Fit] = {}
        self._table = RankTable("d", law.coefficients)
        self.refused_total = 0

    def learn(self, rank: WorkerRank, features: tuple[float, ...], seconds: float) -> None:
        """Learn that the rank took `seconds` with these features (without the constant).

        An impossible measurement (negative, above `SECONDS_MAX` or `FEATURE_MAX`, not a number) is counted, not learnt.
        """
        possible = 0.0 < seconds <= SECONDS_MAX and all(0.0 <= each <= FEATURE_MAX for each in features)
        if not possible or len(features) + 1 != len(self._law.scales):
            self.refused_total += 1
            return
        fit = self._fits.get(rank)
        if fit is None:
            fit = self._fits[rank] = _Fit(self._law)
        scaled = [each / scale for each, scale in zip((1.0, *features), self._law.scales, strict=True)]
        self._update(fit, scaled, seconds)
        self._show(rank, fit)

    def _show(self, rank: WorkerRank, fit: _Fit) -> None:
        unscaled = [each / scale for each, scale in zip(fit.weights, self._law.scales, strict=True)]
        self._table.put(self._table.row(rank), *unscaled)

    def rows(self) -> list[FitRow]:
        """Return the rows for a checkpoint."""
        return [FitRow(rank, fit.weights, fit.covariance) for rank, fit in self._fits.items()]

    def restore(self, row: FitRow) -> None:
        """Restore the fit of the rank."""
        fit = self._fits[row.rank] = _Fit(self._law)
        fit.weights, fit.covariance = row.weights, row.covariance
        self._show(row.rank, fit)

    def _update(self, fit: _Fit, features: list[float], seconds: float) -> None:
        reach = [_dot(row, features) for row in fit.covariance]
        predicted = _dot(fit.weights, features)
        spread = _dot(features, reach) + (NOISE * max(predicted, FLOOR_S)) ** 2
        bound = OUTLIER * math.sqrt(spread)
        error = min(max(seconds - predicted, -bound), bound)
        fit.weights = [
            max(0.0, weight + along * error / spread) for weight, along in zip(fit.weights, reach, strict=True)
        ]
        self._learnt(fit, reach, spread)

    def _learnt(self, fit: _Fit, reach: list[float], spread: float) -> None:
        """Update the covariance after a measurement, and discount the former ones."""
        covariance = [
            [known - along * across / spread for known, across in zip(row, reach, strict=True)]
            for row, along in zip(fit.covariance, reach, strict=True)
        ]
        growth = []
        for at, variance in enumerate(self._variances):
            left = covariance[at][at] = max(covariance[at][at], VARIANCE_MIN * variance)
            growth.append(math.sqrt(max(1.0, min(1.0 / FORGETTING, VARIANCE_MAX * variance / left))))
        fit.covariance = [
            [known * along * across for known, across in zip(row, growth, strict=True)]
            for row, along in zip(covariance, growth, strict=True)
        ]

    def predict_columns(self, ranks: tuple[WorkerRank, ...], features: tuple[Column, ...]) -> NDArray[np.float64]:
        """Return seconds, 0 or more, in the order of `ranks`: a feature is one number, or a column of such.

        For a rank that has served nothing, it is the prior's prediction.
        """
        coefficients = self._table.columns(ranks)
        seconds: NDArray[np.float64] = coefficients[0].copy()
        for coefficient, feature in zip(coefficients[1:], features, strict=True):
            seconds += coefficient * feature
        return seconds

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left or restarted."""
        for rank in [rank for rank in self._fits if rank.worker_id == worker_id]:
            del self._fits[rank]
            self._table.remove(rank)


class TtftModel(LatencyModel):
    """Features: uncached tokens of the request, prefill tokens queued before it, running requests."""

    def __init__(self) -> None:
        super().__init__(TTFT)


class ItlModel(LatencyModel):
    """Features: running requests, active blocks."""

    def __init__(self) -> None:
        super().__init__(ITL)
