"""How fast each rank computes prompts and answers, and how long answers are: learnt from outcomes.

What a reference engine needs (`PREFILL_*`, `STEP_*`), times a factor:

    prefill   uncached tokens * PREFILL_TOKEN_S + attention pairs * PREFILL_PAIR_S
    step      STEP_S + sequences * STEP_SEQUENCE_S + KV tokens * STEP_KV_TOKEN_S

    ratio          measured TTFT / (FIRST_S + prefill of the queue and of the request), or measured ITL / step
    gain           max(1 / (n + GAIN_FIRST), GAIN) for the n-th measurement
    model         += gain * (ratio / rank - model)    by measurements of all ranks; within 1 / MAX .. MAX, at first 1
    rank          += gain * (ratio / model - rank)    by its own; within 1 / RANK_MAX .. RANK_MAX, at first 1
    mean           of the ranks, each with the weight of its measurements, WEIGHT_MAX at most; at first 1
    believed       mean + (rank - mean) * n / (n + DOUBT) / 2^(whole FORGET_S since the rank's last measurement)
    far            believed / mean, or mean / believed: the one that is at least 1
    taken          min(far, max(1, 1 + (far - ALIKE) * RAMP)): 1 up to ALIKE, whole from ALIKE^2 on, in between a line
    factor         model * mean * taken, or / taken

A ratio counts as RATIO_MAX times or 1 / RATIO_MAX of what was known at most, so one stray measurement moves a factor by
an eighth at most. What one rank shows of the model counts for all: a rank without measurements, or with few, is taken
to be like the others, however far all are from the reference engine. A rank that seems fast does not get everything,
nor is one that seems slow avoided for ever. Impossible latencies (0 or less, above `SECONDS_MAX`, not a number) are
counted and not learnt. Ranks that are equal differ by chance: if that counted, the least would get all requests of an
idle fleet.

A rank belongs to the model of its first outcome: later outcomes count for that model's factors, whichever model of its
worker they were for. What is left of a model's last rank that is forgotten stays in the model's factor.

The length of answers is learnt per model, in the same way. A router that starts again begins with the means and lengths
that it had learnt (`RatesRestored`); the factors of single ranks it learns anew. The same outcomes in the same order
give the same bits.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OUTPUT_TOKENS_MAX, RATE_FACTOR_MAX, LearntRates, OutcomeKnown

FIRST_S = 17.0e-3
"""Of a TTFT, whatever the prompt. Source: relative least squares through the TTFT rows of
`captures/h200_calibration.json` (vLLM 0.24.0, Qwen3-8B dimensions, 128..32768 tokens): 17.0 ms + 24.4 us a token,
median error 20 %, worst 50 % (attention is not linear)."""
PREFILL_TOKEN_S, PREFILL_PAIR_S = 22.8e-6, 0.830e-9
STEP_S, STEP_SEQUENCE_S, STEP_KV_TOKEN_S = 5.52e-3, 12.7e-6, 34.7e-9
"""Source: `worker_agent/engines/simulated/timing.py` (H200, 8B parameters), and `ITL` of the same module."""
GAIN, GAIN_FIRST = 0.03, 3
RATIO_MAX, RANK_MAX, MAX = 3.0, 2.0, RATE_FACTOR_MAX
FORGET_S, ALIKE = 30.0, 1.25
RAMP = (ALIKE + 1.0) / ALIKE
WEIGHT_MAX, DOUBT = 32, 8.0
SECONDS_MAX = 600.0
HALVINGS_MAX = 64
OUTPUT_TOKENS = 128.0
"""Of an answer, before any is known."""


class Expected(NamedTuple):
    """A decision without an outcome yet: the TTFT and the ITL of the reference engine in its place."""

    decision_id: str
    model: str
    rank: WorkerRank
    ttft_s: float
    itl_s: float


@dataclass
class Own:
    """A rank's own factor beside its model's, after so many measurements."""

    factor: float = 1.0
    measured: int = 0

    @property
    def weight(self) -> int:
        return min(self.measured, WEIGHT_MAX)


@dataclass
class Shared:
    """One factor of a model, which all its ranks share; sum of the ranks' own times their weights, and of the weights.

    The sum is kept, not summed up anew: its bits depend on the order of all measurements.
    """

    factor: float = 1.0
    measured: int = 0
    weighted: float = 0.0
    weights: int = 0

    @property
    def mean(self) -> float:
        return self.weighted / self.weights if self.weights else 1.0

    def learn(self, own: Own, ratio: float) -> None:
        """Learn from a measurement of a rank, as a multiple of the reference engine's."""
        self.factor = within(nearer(self.factor, ratio / own.factor, self.measured), MAX)
        self.measured += 1
        learnt = Own(within(nearer(own.factor, ratio / self.factor, own.measured), RANK_MAX), own.measured + 1)
        self.weighted += learnt.factor * learnt.weight - own.factor * own.weight
        self.weights += learnt.weight - own.weight
        own.factor, own.measured = learnt.factor, learnt.measured

    def left(self, own: Own) -> None:
        """Take a rank out of the mean; what is left of the last one stays in the shared factor."""
        if own.weight and own.weight == self.weights:
            self.factor = within(self.factor * own.factor, MAX)
        self.weights -= own.weight
        self.weighted = self.weighted - own.factor * own.weight if self.weights else 0.0

    def used(self, own: Own, age_s: float) -> float:
        """Return the factor of a rank that was measured last so long ago."""
        mean = self.mean
        halvings = int(min(max(age_s / FORGET_S, 0.0), HALVINGS_MAX))
        left = (own.factor - mean) * (own.measured / (own.measured + DOUBT)) * math.ldexp(1.0, -halvings)
        believed = mean + left
        far = max(believed, mean) / min(believed, mean)
        taken = min(far, max(1.0, 1.0 + (far - ALIKE) * RAMP))
        return (mean / taken if believed < mean else mean * taken) * self.factor


@dataclass
class Model:
    """What is known of a model: its factors, and the length of its answers, after so many."""

    prefill: Shared = field(default_factory=Shared)
    decode: Shared = field(default_factory=Shared)
    output_tokens: float = OUTPUT_TOKENS
    answers: int = 0


@dataclass
class Rank:
    """A rank's factors, and when the last measurement was."""

    model: str
    prefill: Own = field(default_factory=Own)
    decode: Own = field(default_factory=Own)
    measured_s: float = -math.inf


class Rates:
    """The factors of all ranks; a fold over decisions and their outcomes."""

    def __init__(self) -> None:
        self.ranks: dict[WorkerRank, Rank] = {}
        self.models: dict[str, Model] = {}
        self.pending: dict[str, Expected] = {}
        self.refused = 0

    def used(self, model: str, rank: WorkerRank, now_s: float) -> tuple[float, float]:
        """Return the factors of a rank that serves the model, as they are used now: prefill and decode."""
        known, own = self.models.get(model, Model()), self.ranks.get(rank, Rank(model))
        age_s = now_s - own.measured_s
        return known.prefill.used(own.prefill, age_s), known.decode.used(own.decode, age_s)

    def output_tokens(self, model: str) -> float:
        return self.models.get(model, Model()).output_tokens

    def decided(self, expected: Expected) -> None:
        """Keep what is expected of a decision that is carried out, until its outcome."""
        self.pending[expected.decision_id] = expected

    def ended(self, outcome: OutcomeKnown) -> None:
        """Learn from the outcome of a decision; of one that failed nothing."""
        expected = self.pending.pop(outcome.decision_id, None)
        if expected is None or outcome.outcome != "ok":
            return
        if expected.rank not in self.ranks:
            self.models.setdefault(expected.model, Model())
            self.ranks[expected.rank] = Rank(expected.model)
        rank = self.ranks[expected.rank]
        model = self.models[rank.model]
        if outcome.ttft_s is not None and expected.ttft_s and self._is_possible(outcome.ttft_s):
            model.prefill.learn(rank.prefill, outcome.ttft_s / expected.ttft_s)
        if outcome.itl_s is not None and self._is_possible(outcome.itl_s):
            model.decode.learn(rank.decode, outcome.itl_s / expected.itl_s)
        rank.measured_s = outcome.now_s
        if outcome.output_tokens:
            tokens = min(float(outcome.output_tokens), OUTPUT_TOKENS_MAX)
            model.output_tokens += gain(model.answers) * (tokens - model.output_tokens)
            model.answers += 1

    def _is_possible(self, seconds: float) -> bool:
        is_possible = 0.0 < seconds <= SECONDS_MAX
        self.refused += not is_possible
        return is_possible

    def restore(self, models: tuple[LearntRates, ...]) -> None:
        """Begin with what a former router had learnt of models that are not known yet."""
        for known in models:
            if known.model not in self.models:
                prefill, decode = Shared(known.prefill, known.answers), Shared(known.decode, known.answers)
                self.models[known.model] = Model(prefill, decode, known.output_tokens, known.answers)

    def forget(self, worker_id: str) -> None:
        for rank in [rank for rank in self.ranks if rank.worker_id == worker_id]:
            gone = self.ranks.pop(rank)
            self.models[gone.model].prefill.left(gone.prefill)
            self.models[gone.model].decode.left(gone.decode)
        self.pending = {name: each for name, each in self.pending.items() if each.rank.worker_id != worker_id}

    def expected_of(self, decision_id: str) -> tuple[str, float, float]:
        """Return what is expected of a decision: its model, empty if nothing is, TTFT and ITL."""
        pending = self.pending.get(decision_id)
        return ("", 0.0, 0.0) if pending is None else (pending.model, pending.ttft_s, pending.itl_s)

    def tables(self) -> dict[str, list[Any]]:
        return {
            "totals": [self.refused],
            "model_rates": [
                (name, [*vars(each.prefill).values()], [*vars(each.decode).values()], each.output_tokens, each.answers)
                for name, each in self.models.items()
            ],
            "rank_rates": [
                (
                    rank,
                    (
                        each.model, each.prefill.factor, each.decode.factor,
                        each.prefill.measured, each.decode.measured, each.measured_s,
                    ),
                )
                for rank, each in self.ranks.items()
            ],
        }  # fmt: skip


def gain(measurements: int) -> float:
    """Return how much the next measurement counts."""
    return max(1.0 / (measurements + GAIN_FIRST), GAIN)


def nearer(factor: float, ratio: float, measurements: int) -> float:
    """Return the factor after a measurement."""
    near = min(max(ratio, factor / RATIO_MAX), factor * RATIO_MAX)
    return factor + gain(measurements) * (near - factor)


def within(factor: float, span: float) -> float:
    """Return the factor, or the bound that it exceeds."""
    return min(max(factor, 1.0 / span), span)
