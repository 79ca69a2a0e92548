"""How fast each rank computes prompts and answers, and how long answers are: learnt from outcomes. Pure.

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
idle fleet. Versions before drew every factor nearer to the mean by `ALIKE`, however far it was; their journals are
replayed so (`RateSpread`).

The length of answers is learnt per model, in the same way. A router that starts again begins with the means and lengths
that it had learnt (`rates_store.py`); the factors of single ranks it learns anew. The same outcomes in the same order
give the same bits: arithmetic is Python's, or C++ by the same steps.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OUTPUT_TOKENS_MAX, RATE_FACTOR_MAX, LearntRates, OutcomeKnown
from router import native
from router.fleet.rank_table import RankTable
from router.journal.checkpoint_rows import ExpectedRow, ModelRatesRow, RankRatesRow, RatesTotals

FIRST_S = 17.0e-3
"""Of a TTFT, whatever the prompt. Source: as `router/fleet/ttft_model.TTFT`."""
PREFILL_TOKEN_S, PREFILL_PAIR_S = 22.8e-6, 0.830e-9
STEP_S, STEP_SEQUENCE_S, STEP_KV_TOKEN_S = 5.52e-3, 12.7e-6, 34.7e-9
"""Source: `worker_agent/engines/simulated/timing.py` (H200, 8B parameters) and `router/fleet/ttft_model.ITL`."""
GAIN, GAIN_FIRST = 0.03, 3
RATIO_MAX, RANK_MAX, MAX = 3.0, 2.0, RATE_FACTOR_MAX
FORGET_S, ALIKE = 30.0, 1.25
RAMP = (ALIKE + 1.0) / ALIKE
RateSpread = Literal["lessened", "whole"]
"""How far from the mean a factor counts that is beyond `ALIKE` of it: nearer by `ALIKE`, or as above."""
WEIGHT_MAX, DOUBT = 32, 8.0
SECONDS_MAX = 600.0
_HALVINGS_MAX = 64
OUTPUT_TOKENS = 128.0
"""Of an answer, before any is known."""
PENDING_MAX = 65_536
"""Largest number of decisions without an outcome; beyond it the oldest is dropped, and not learnt from."""

Floats = NDArray[np.float64]


class RateColumns(NamedTuple):
    """The factors of some ranks, in their order, and the expected tokens of an answer."""

    prefill: Floats
    decode: Floats
    output_tokens: float
    is_learnt: bool = False
    """Whether the prefill factors are of measurements, of these ranks or of a former router's; else they are 1."""


class RatesStatistics(NamedTuple):
    """Factors of the ranks, prefill and decode; expected tokens of an answer by model; refused measurements."""

    ranks: dict[WorkerRank, tuple[float, float]]
    output_tokens: dict[str, float]
    refused_total: int


class Factor:
    """One factor of a model, which all its ranks share, and the ranks' own beside it."""

    __slots__ = ("measured", "shared", "weighted", "weights")

    def __init__(self) -> None:
        self.shared, self.measured = 1.0, 0
        self.weighted, self.weights = 0.0, 0
        """Sum of the ranks' factors times their weights, and of the weights."""

    @property
    def mean(self) -> float:
        """The ranks' mean."""
        return self.weighted / self.weights if self.weights else 1.0

    def learn(self, own: float, measured: int, ratio: float) -> float:
        """Learn from a measurement of a rank that had so many; return the rank's own factor from now on."""
        self.shared = _within(_nearer(self.shared, ratio / own, self.measured), MAX)
        self.measured += 1
        learnt = _within(_nearer(own, ratio / self.shared, measured), RANK_MAX)
        before, after = min(measured, WEIGHT_MAX), min(measured + 1, WEIGHT_MAX)
        self.weighted += learnt * after - own * before
        self.weights += after - before
        return learnt

    def left(self, own: float, measured: int) -> None:
        """Take a rank out of the mean; what is left of the last one stays in the shared factor."""
        weight = min(measured, WEIGHT_MAX)
        if weight and weight == self.weights:
            self.shared = _within(self.shared * own, MAX)
        self.weights -= weight
        self.weighted = self.weighted - own * weight if self.weights else 0.0


class _Model:
    """What is known of a model: its factors, and the length of its answers, after so many."""

    __slots__ = ("answers", "decode", "output_tokens", "prefill")

    def __init__(self) -> None:
        self.prefill, self.decode = Factor(), Factor()
        self.output_tokens, self.answers = OUTPUT_TOKENS, 0


class _Rank:
    """A rank's factors beside its model's, how many measurements of each there were, and when the last was."""

    __slots__ = ("decode", "decodes", "measured_s", "model", "prefill", "prefills")

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.prefill = self.decode = 1.0
        self.prefills = self.decodes = 0
        self.measured_s = 0.0

    def learn_prefill(self, ratio: float) -> None:
        """Learn from a TTFT, as a multiple of the reference engine's."""
        self.prefill = self.model.prefill.learn(self.prefill, self.prefills, ratio)
        self.prefills += 1

    def learn_decode(self, ratio: float) -> None:
        """Learn from an ITL, as a multiple of the reference engine's."""
        self.decode = self.model.decode.learn(self.decode, self.decodes, ratio)
        self.decodes += 1


class Rates:
    """The factors of all ranks; a fold over decisions and their outcomes."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerRank, _Rank] = {}
        self._models: dict[str, _Model] = {}
        self._pending: dict[str, ExpectedRow] = {}
        self._refused = 0
        self._table = RankTable("d", (1.0, 1.0, 0.0, 0.0, -math.inf))
        """Prefill and decode beside the model's, how far each is believed (0..1), and when the last measurement was."""

    def columns(
        self, model: str, ranks: tuple[WorkerRank, ...], now_s: float, spread: RateSpread = "whole"
    ) -> RateColumns:
        """Return the factors of ranks that serve the model, as they are used now; read-only."""
        known = self._models.get(model) or _Model()
        factors = used(self._table, ranks, known.prefill, known.decode, now_s, spread)
        return RateColumns(factors[0], factors[1], known.output_tokens, known.prefill.measured > 0)

    def decided(self, expected: ExpectedRow) -> None:
        """Keep what is expected of a decision that is carried out, until its outcome."""
        if len(self._pending) >= PENDING_MAX:
            del self._pending[next(iter(self._pending))]
        self._pending[expected.decision_id] = expected

    def ended(self, outcome: OutcomeKnown) -> None:
        """Learn from the outcome of a decision; of one that failed nothing."""
        expected = self._pending.pop(outcome.decision_id, None)
        if expected is None or outcome.outcome != "ok":
            return
        rank = self._ranks.get(expected.rank) or self._joined(expected)
        model = rank.model
        if outcome.ttft_s is not None and expected.ttft_s and self._is_possible(outcome.ttft_s):
            rank.learn_prefill(outcome.ttft_s / expected.ttft_s)
        itl_s = outcome.mean_itl_s
        if itl_s is not None and self._is_possible(itl_s):
            rank.learn_decode(itl_s / expected.itl_s)
        rank.measured_s = outcome.now_s
        if outcome.output_tokens:
            tokens = min(float(outcome.output_tokens), OUTPUT_TOKENS_MAX)
            model.output_tokens += _gain(model.answers) * (tokens - model.output_tokens)
            model.answers += 1
        self._show(expected.rank, rank)

    def _show(self, at: WorkerRank, rank: _Rank) -> None:
        beliefs = rank.prefills / (rank.prefills + DOUBT), rank.decodes / (rank.decodes + DOUBT)
        self._table.put(self._table.row(at), rank.prefill, rank.decode, *beliefs, rank.measured_s)

    def _joined(self, expected: ExpectedRow) -> _Rank:
        model = self._models.get(expected.model)
        if model is None:
            model = self._models[expected.model] = _Model()
        rank = self._ranks[expected.rank] = _Rank(model)
        return rank

    def _is_possible(self, seconds: float) -> bool:
        is_possible = 0.0 < seconds <= SECONDS_MAX
        self._refused += not is_possible
        return is_possible

    def statistics(self) -> RatesStatistics:
        """Return all factors, and the number of refused measurements."""
        return RatesStatistics(
            {
                rank: (each.model.prefill.shared * each.prefill, each.model.decode.shared * each.decode)
                for rank, each in self._ranks.items()
            },
            {model: each.output_tokens for model, each in self._models.items()},
            self._refused,
        )

    def learnt(self) -> tuple[LearntRates, ...]:
        """Return what was learnt of each model: what a router that starts can go on from."""
        return tuple(
            LearntRates(
                name,
                _within(each.prefill.shared * each.prefill.mean, MAX),
                _within(each.decode.shared * each.decode.mean, MAX),
                each.output_tokens,
                each.answers,
            )
            for name, each in self._models.items()
        )

    def restore_learnt(self, models: tuple[LearntRates, ...]) -> None:
        """Begin with what a former router had learnt of models that are not known yet."""
        for known in models:
            if known.model not in self._models:
                model = self._models[known.model] = _Model()
                model.prefill.shared, model.decode.shared = known.prefill, known.decode
                model.output_tokens = known.output_tokens
                model.prefill.measured = model.decode.measured = model.answers = known.answers

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left or restarted."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            gone = self._ranks.pop(rank)
            gone.model.prefill.left(gone.prefill, gone.prefills)
            gone.model.decode.left(gone.decode, gone.decodes)
            self._table.remove(rank)
        for decision_id in [each for each, known in self._pending.items() if known.rank.worker_id == worker_id]:
            del self._pending[decision_id]

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> RatesTotals:
        """Return the row for a checkpoint."""
        return RatesTotals(self._refused)

    def restore_totals(self, row: RatesTotals) -> None:
        """Restore the total from the row."""
        self._refused = row.refused_total

    def model_rows(self) -> list[ModelRatesRow]:
        """Return the rows of models for a checkpoint."""
        return [
            ModelRatesRow(name, *_state(each.prefill), *_state(each.decode), each.output_tokens, each.answers)
            for name, each in self._models.items()
        ]

    def restore_model(self, row: ModelRatesRow) -> None:
        """Restore a model from the row, before its ranks."""
        model = self._models[row.model] = _Model()
        for factor, state in ((model.prefill, row[1:5]), (model.decode, row[5:9])):
            factor.shared, factor.measured, factor.weighted, factor.weights = state
        model.output_tokens, model.answers = row[9:]

    def rank_rows(self) -> list[RankRatesRow]:
        """Return the rows of ranks for a checkpoint."""
        names = {id(model): name for name, model in self._models.items()}
        return [
            RankRatesRow(
                rank, names[id(each.model)], each.prefill, each.decode, each.prefills, each.decodes, each.measured_s
            )
            for rank, each in self._ranks.items()
        ]

    def restore_rank(self, row: RankRatesRow) -> None:
        """Restore a rank from the row."""
        rank = self._ranks[row.rank] = _Rank(self._models[row.model])
        rank.prefill, rank.decode, rank.prefills, rank.decodes, rank.measured_s = row[2:]
        self._show(row.rank, rank)

    def expected_rows(self) -> list[ExpectedRow]:
        """Return the decisions without an outcome, for a checkpoint."""
        return list(self._pending.values())

    def restore_expected(self, row: ExpectedRow) -> None:
        """Restore a decision without an outcome."""
        self._pending[row.decision_id] = row


def used_in_numpy(columns: Floats, prefill: Factor, decode: Factor, now_s: float, spread: RateSpread) -> Floats:
    """Return the factors as they are used now, (2, n), of the columns of the table; bit for bit as `used`."""
    mean = np.array([[prefill.mean], [decode.mean]])
    left = (columns[:2] - mean) * columns[2:4]
    measured_s = columns[4]
    if now_s - np.minimum.reduce(measured_s) >= FORGET_S:
        ages = np.minimum(np.maximum((now_s - measured_s) / FORGET_S, 0.0), _HALVINGS_MAX)
        left = left * np.ldexp(1.0, -ages.astype(np.int32))
    believed = mean + left
    if spread == "whole":
        far = np.maximum(believed, mean) / np.minimum(believed, mean)
        taken = np.minimum(far, np.maximum(1.0, 1.0 + (far - ALIKE) * RAMP))
        near = np.where(believed < mean, mean / taken, mean * taken)
    else:
        near = np.minimum(np.maximum(mean, believed / ALIKE), believed * ALIKE)
    factors: Floats = near * np.array([[prefill.shared], [decode.shared]])
    return factors


_built: Any = native.load()
_rules: Any = _built and _built.FactorRules(FORGET_S, ALIKE, RAMP, _HALVINGS_MAX)


def used(
    table: RankTable, ranks: tuple[WorkerRank, ...], prefill: Factor, decode: Factor, now_s: float, spread: RateSpread
) -> Floats:
    """Return the factors as they are used now, (2, n). Columns of the table: prefill, decode, beliefs in them, time."""
    if _rules is None:
        return used_in_numpy(table.columns(ranks), prefill, decode, now_s, spread)
    shared = prefill.shared, prefill.mean, decode.shared, decode.mean
    return np.ndarray(
        (2, len(ranks)), np.float64, _rules.used(*table.rows_of(ranks), *shared, now_s, spread == "whole")
    )


def _state(factor: Factor) -> tuple[float, int, float, int]:
    return factor.shared, factor.measured, factor.weighted, factor.weights


def _gain(measurements: int) -> float:
    return max(1.0 / (measurements + GAIN_FIRST), GAIN)


def _nearer(factor: float, ratio: float, measurements: int) -> float:
    near = min(max(ratio, factor / RATIO_MAX), factor * RATIO_MAX)
    return factor + _gain(measurements) * (near - factor)


def _within(factor: float, span: float) -> float:
    return min(max(factor, 1.0 / span), span)
