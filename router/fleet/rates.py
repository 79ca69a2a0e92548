"""How fast each rank computes prompts and answers, and how long answers are: learnt from outcomes. Pure.

What a reference engine needs (`PREFILL_*`, `STEP_*`), times a factor:

    prefill   uncached tokens * PREFILL_TOKEN_S + attention pairs * PREFILL_PAIR_S
    step      STEP_S + sequences * STEP_SEQUENCE_S + KV tokens * STEP_KV_TOKEN_S

    ratio          measured TTFT / (FIRST_S + prefill of the queue and of the request), or measured ITL / step
    gain           max(1 / (n + GAIN_FIRST), GAIN) for a rank's n-th measurement
    factor        += gain * (ratio within factor / RATIO_MAX .. factor * RATIO_MAX - factor)
                   it begins at the mean, and stays within mean / RANK_MAX .. mean * RANK_MAX and 1 / MAX .. MAX
    mean           of the factors of all ranks that serve the model; at first 1
    remembered     mean + (factor - mean) / 2^(whole FORGET_S since the rank's last measurement); without one, mean
    used           mean if that is within 1 / ALIKE .. ALIKE of it; otherwise nearer to the mean by so much

So one stray measurement moves a factor little, and a rank without measurements is taken to be like the others. A rank
that seems fast does not get everything, nor is one that seems slow avoided for ever. Impossible latencies (0 or less,
above `SECONDS_MAX`, not a number) are counted and not learnt. Factors of equal ranks differ by chance: if that counted,
the least would get all requests of an idle fleet.

The length of answers is learnt per model, in the same way. A router that starts again begins with the means and lengths
that it had learnt (`rates_store.py`); the factors of single ranks it learns anew. The same outcomes in the same order
give the same bits: arithmetic is Python's, or C++ by the same steps.
"""

import math
from typing import Any, NamedTuple

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


class RatesStatistics(NamedTuple):
    """Factors of the ranks, prefill and decode; expected tokens of an answer by model; refused measurements."""

    ranks: dict[WorkerRank, tuple[float, float]]
    output_tokens: dict[str, float]
    refused_total: int


class _Model:
    """What is known of a model: the mean of its ranks' factors, of so many ranks, and the length of its answers."""

    __slots__ = ("answers", "decode", "output_tokens", "prefill", "ranks")

    def __init__(self) -> None:
        self.prefill = self.decode = 1.0
        self.ranks = 0
        self.output_tokens, self.answers = OUTPUT_TOKENS, 0

    def left(self, rank: "_Rank") -> None:
        """Take a rank out of the means; after the last one they stay."""
        self.ranks -= 1
        if self.ranks:
            self.prefill = _within(self.prefill + (self.prefill - rank.prefill) / self.ranks, 1.0, MAX)
            self.decode = _within(self.decode + (self.decode - rank.decode) / self.ranks, 1.0, MAX)


class _Rank:
    """A rank's factors, how many measurements of each there were, and when the last was."""

    __slots__ = ("decode", "decodes", "measured_s", "model", "prefill", "prefills")

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.prefill, self.decode = model.prefill, model.decode
        self.prefills = self.decodes = 0
        self.measured_s = 0.0

    def learn_prefill(self, ratio: float) -> None:
        """Learn from a TTFT, as a multiple of the reference engine's."""
        model, before = self.model, self.prefill
        self.prefill = _bounded(_nearer(before, ratio, self.prefills), model.prefill)
        model.prefill += (self.prefill - before) / model.ranks
        self.prefills += 1

    def learn_decode(self, ratio: float) -> None:
        """Learn from an ITL, as a multiple of the reference engine's."""
        model, before = self.model, self.decode
        self.decode = _bounded(_nearer(before, ratio, self.decodes), model.decode)
        model.decode += (self.decode - before) / model.ranks
        self.decodes += 1


class Rates:
    """The factors of all ranks; a fold over decisions and their outcomes."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerRank, _Rank] = {}
        self._models: dict[str, _Model] = {}
        self._pending: dict[str, ExpectedRow] = {}
        self._refused = 0
        self._table = RankTable("d", (1.0, 1.0, -math.inf))
        """Prefill, decode, and when the last measurement was."""

    def columns(self, model: str, ranks: tuple[WorkerRank, ...], now_s: float) -> RateColumns:
        """Return the factors of ranks that serve the model, as they are used now; read-only."""
        known = self._models.get(model) or _Model()
        factors = used(self._table.columns(ranks), known.prefill, known.decode, now_s)
        return RateColumns(factors[0], factors[1], known.output_tokens)

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
        self._table.put(self._table.row(at), rank.prefill, rank.decode, rank.measured_s)

    def _joined(self, expected: ExpectedRow) -> _Rank:
        model = self._models.get(expected.model)
        if model is None:
            model = self._models[expected.model] = _Model()
        rank = self._ranks[expected.rank] = _Rank(model)
        model.ranks += 1
        return rank

    def _is_possible(self, seconds: float) -> bool:
        is_possible = 0.0 < seconds <= SECONDS_MAX
        self._refused += not is_possible
        return is_possible

    def statistics(self) -> RatesStatistics:
        """Return all factors, and the number of refused measurements."""
        return RatesStatistics(
            {rank: (each.prefill, each.decode) for rank, each in self._ranks.items()},
            {model: each.output_tokens for model, each in self._models.items()},
            self._refused,
        )

    def learnt(self) -> tuple[LearntRates, ...]:
        """Return what was learnt of each model: what a router that starts can go on from."""
        return tuple(
            LearntRates(name, each.prefill, each.decode, each.output_tokens, each.answers)
            for name, each in self._models.items()
        )

    def restore_learnt(self, models: tuple[LearntRates, ...]) -> None:
        """Begin with what a former router had learnt of models that are not known yet."""
        for known in models:
            if known.model not in self._models:
                model = self._models[known.model] = _Model()
                model.prefill, model.decode = known.prefill, known.decode
                model.output_tokens, model.answers = known.output_tokens, known.answers

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left or restarted."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            gone = self._ranks.pop(rank)
            gone.model.left(gone)
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
            ModelRatesRow(name, each.prefill, each.decode, each.ranks, each.output_tokens, each.answers)
            for name, each in self._models.items()
        ]

    def restore_model(self, row: ModelRatesRow) -> None:
        """Restore a model from the row, before its ranks."""
        model = self._models[row.model] = _Model()
        model.prefill, model.decode, model.ranks = row.prefill, row.decode, row.ranks
        model.output_tokens, model.answers = row.output_tokens, row.answers

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


def used_in_numpy(columns: Floats, prefill: float, decode: float, now_s: float) -> Floats:
    """Return the factors as they are used now, (2, n), of these columns: prefill, decode, time of the last measurement.

    `prefill` and `decode` are the means.
    """
    factors, measured_s, mean = columns[:2], columns[2], np.array([[prefill], [decode]])
    if now_s - np.minimum.reduce(measured_s) >= FORGET_S:
        ages = np.minimum(np.maximum((now_s - measured_s) / FORGET_S, 0.0), _HALVINGS_MAX)
        factors = mean + (factors - mean) * np.ldexp(1.0, -ages.astype(np.int32))
    used: Floats = np.minimum(np.maximum(mean, factors / ALIKE), factors * ALIKE)
    return used


_built: Any = native.load()
_rules: Any = _built and _built.FactorRules(FORGET_S, ALIKE, _HALVINGS_MAX)


def used(columns: Floats, prefill: float, decode: float, now_s: float) -> Floats:
    """Return what `used_in_numpy` returns, bit for bit."""
    if _rules is None:
        return used_in_numpy(columns, prefill, decode, now_s)
    packed = _rules.used(columns[0], columns[1], columns[2], prefill, decode, now_s)
    return np.ndarray((2, columns.shape[1]), np.float64, packed)


def _gain(measurements: int) -> float:
    return max(1.0 / (measurements + GAIN_FIRST), GAIN)


def _nearer(factor: float, ratio: float, measurements: int) -> float:
    near = min(max(ratio, factor / RATIO_MAX), factor * RATIO_MAX)
    return factor + _gain(measurements) * (near - factor)


def _bounded(factor: float, mean: float) -> float:
    return _within(_within(factor, mean, RANK_MAX), 1.0, MAX)


def _within(factor: float, middle: float, span: float) -> float:
    return min(max(factor, middle / span), middle * span)
