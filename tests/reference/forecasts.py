"""Predicts TTFT and ITL of a request at each rank, and learns from measured latencies.

    decided           the features of the winner are kept until the outcome is known
    outcome known     ok: TTFT and ITL are learnt with these features, each if it was measured
                      (`router/native/answer.hpp`); any other outcome: nothing is learnt
    worker forgotten  all that was learnt of it is dropped

Only decisions of modes that read forecasts are learnt from: those of other modes lack features.

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

Features are scaled to the order of 1 within. Arithmetic is term by term in a fixed order: the same measurements in the
same order give the same bits.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown

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
PENDING_MAX = 65_536
"""Largest number of decisions without an outcome; beyond it the oldest is dropped, and not learnt from."""


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


@dataclass
class Fit:
    """One rank's coefficients of the scaled features, and their covariance."""

    weights: list[float]
    covariance: list[list[float]]


class LatencyModel:
    """One law, fitted to each rank. A pure fold over the measurements, in their order."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.weights = [each * scale for each, scale in zip(*law, strict=True)]
        self.variances = [(UNCERTAINTY * each * scale) ** 2 for each, scale in zip(*law, strict=True)]
        self.fits: dict[WorkerRank, Fit] = {}
        self.refused = 0

    def predict(self, rank: WorkerRank, features: tuple[float, ...]) -> float:
        """Return seconds, 0 or more. For a rank that has served nothing, it is the prior's prediction."""
        fit = self.fits.get(rank)
        coefficients = list(self.law.coefficients)
        if fit is not None:
            coefficients = [each / scale for each, scale in zip(fit.weights, self.law.scales, strict=True)]
        return dot(coefficients, [1.0, *features])

    def learn(self, rank: WorkerRank, features: tuple[float, ...], seconds: float) -> None:
        """Learn that the rank took `seconds` with these features (without the constant).

        An impossible measurement (negative, above `SECONDS_MAX` or `FEATURE_MAX`, not a number) is counted, not learnt.
        """
        if not (0.0 < seconds <= SECONDS_MAX and all(0.0 <= each <= FEATURE_MAX for each in features)):
            self.refused += 1
            return
        if rank not in self.fits:
            size = range(len(self.variances))
            covariance = [[self.variances[row] if row == column else 0.0 for column in size] for row in size]
            self.fits[rank] = Fit(self.weights, covariance)
        scaled = [each / scale for each, scale in zip((1.0, *features), self.law.scales, strict=True)]
        self.fits[rank] = self._updated(self.fits[rank], scaled, seconds)

    def _updated(self, fit: Fit, features: list[float], seconds: float) -> Fit:
        reach = [dot(row, features) for row in fit.covariance]
        predicted = dot(fit.weights, features)
        spread = dot(features, reach) + (NOISE * max(predicted, FLOOR_S)) ** 2
        bound = OUTLIER * math.sqrt(spread)
        error = min(max(seconds - predicted, -bound), bound)
        weights = [max(0.0, weight + along * error / spread) for weight, along in zip(fit.weights, reach, strict=True)]
        covariance = [
            [known - along * across / spread for known, across in zip(row, reach, strict=True)]
            for row, along in zip(fit.covariance, reach, strict=True)
        ]
        growth = []
        for at, variance in enumerate(self.variances):
            left = covariance[at][at] = max(covariance[at][at], VARIANCE_MIN * variance)
            growth.append(math.sqrt(max(1.0, min(1.0 / FORGETTING, VARIANCE_MAX * variance / left))))
        return Fit(
            weights,
            [
                [known * along * across for known, across in zip(row, growth, strict=True)]
                for row, along in zip(covariance, growth, strict=True)
            ],
        )

    def rows(self) -> list[Any]:
        return [(rank, fit.weights, fit.covariance) for rank, fit in self.fits.items()]


def dot(left: list[float], right: list[float]) -> float:
    """Return the sum of the products, added in their order, to 0."""
    total = 0.0
    for each, other in zip(left, right, strict=True):
        total += each * other
    return total


class Features(NamedTuple):
    """The features that a decision's latencies are learnt with."""

    rank: WorkerRank
    uncached_tokens: float
    queued_tokens: float
    running_requests: float
    active_blocks: float

    @property
    def of_ttft(self) -> tuple[float, ...]:
        return self.uncached_tokens, self.queued_tokens, self.running_requests

    @property
    def of_itl(self) -> tuple[float, ...]:
        return self.running_requests, self.active_blocks


class Forecasts:
    """The latency models of all ranks."""

    def __init__(self) -> None:
        self.ttft, self.itl = LatencyModel(TTFT), LatencyModel(ITL)
        self.pending: dict[str, Features] = {}

    def forecast(self, features: Features) -> tuple[float, float]:
        """Return the predicted TTFT and ITL of a request with these features."""
        return self.ttft.predict(features.rank, features.of_ttft), self.itl.predict(features.rank, features.of_itl)

    def decided(self, decision_id: str, features: Features) -> None:
        """Keep the features of a decision that is carried out."""
        if len(self.pending) >= PENDING_MAX:
            del self.pending[next(iter(self.pending))]
        self.pending[decision_id] = features

    def ended(self, outcome: OutcomeKnown) -> None:
        """Learn from the outcome of a decision."""
        known = self.pending.pop(outcome.decision_id, None)
        if known is None or outcome.outcome != "ok":
            return
        if outcome.ttft_s is not None:
            self.ttft.learn(known.rank, known.of_ttft, outcome.ttft_s)
        if outcome.itl_s is not None:
            self.itl.learn(known.rank, known.of_itl, outcome.itl_s)

    def forget(self, worker_id: str) -> None:
        for model in (self.ttft, self.itl):
            model.fits = {rank: fit for rank, fit in model.fits.items() if rank.worker_id != worker_id}
        self.pending = {name: each for name, each in self.pending.items() if each.rank.worker_id != worker_id}

    def tables(self) -> dict[str, list[Any]]:
        return {
            "forecasts": [(self.ttft.refused, self.itl.refused)],
            "ttft": self.ttft.rows(),
            "itl": self.itl.rows(),
            "pending": list(self.pending.items()),
        }
