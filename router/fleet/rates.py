"""How fast each rank computes prompts and answers, and how long answers are: learnt from outcomes. Pure.

What a reference engine needs (`PREFILL_*`, `STEP_*`), times a factor:

    prefill   uncached tokens * PREFILL_TOKEN_S + attention pairs * PREFILL_PAIR_S
    step      STEP_S + sequences * STEP_SEQUENCE_S + KV tokens * STEP_KV_TOKEN_S

    factor(kind)   begins at 1, within 1 / KIND_MAX .. KIND_MAX; a kind is what serves one model
    factor(rank)   begins at its kind's, within 1 / RANK_MAX .. RANK_MAX of it
    ratio          measured TTFT / (FIRST_S + prefill of the queue and of the request), or measured ITL / step
    gain           max(1 / (n + GAIN_FIRST), GAIN) for the n-th measurement
    factor        += gain * (ratio within factor / RATIO_MAX .. factor * RATIO_MAX - factor)

So one stray measurement moves a factor little, a rank without measurements is taken to be like the others of its
model, and a rank that is measured wrongly, or is 100 times slower, is neither avoided for ever nor given everything.
Impossible latencies (0 or less, above `SECONDS_MAX`, not a number) are counted and not learnt.

The length of answers is learnt per model, in the same way. Arithmetic is Python's, in a fixed order: the same outcomes
in the same order give the same bits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from router.journal.checkpoint_rows import ExpectedRow, KindRatesRow, RankRatesRow, RatesTotals

FIRST_S = 17.0e-3
"""Of a TTFT, whatever the prompt. Source: as `router/fleet/ttft_model.TTFT`."""
PREFILL_TOKEN_S, PREFILL_PAIR_S = 22.8e-6, 0.830e-9
STEP_S, STEP_SEQUENCE_S, STEP_KV_TOKEN_S = 5.52e-3, 12.7e-6, 34.7e-9
"""Source: `worker_agent/engines/simulated/timing.py` (H200, 8B parameters) and `router/fleet/ttft_model.ITL`."""
GAIN, GAIN_FIRST = 0.03, 3
RATIO_MAX, RANK_MAX, KIND_MAX = 3.0, 4.0, 64.0
SECONDS_MAX = 600.0
OUTPUT_TOKENS = 128.0
"""Of an answer, before any is known."""
OUTPUT_TOKENS_MAX = 1e6
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


class _Factors:
    """Prefill and decode, and how many measurements of each there were."""

    __slots__ = ("decode", "decodes", "prefill", "prefills")

    def __init__(self, prefill: float, decode: float) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefills = self.decodes = 0


class _Kind:
    """What is known of a model: the factors of its ranks together, and the length of its answers."""

    __slots__ = ("answers", "factors", "output_tokens")

    def __init__(self) -> None:
        self.factors = _Factors(1.0, 1.0)
        self.output_tokens, self.answers = OUTPUT_TOKENS, 0


class Rates:
    """The factors of all ranks; a fold over decisions and their outcomes."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerRank, _Factors] = {}
        self._kinds: dict[str, _Kind] = {}
        self._pending: dict[str, ExpectedRow] = {}
        self._refused = 0
        self._changes = 0
        self._known: tuple[int, str, tuple[WorkerRank, ...], RateColumns] | None = None

    def columns(self, model: str, ranks: tuple[WorkerRank, ...]) -> RateColumns:
        """Return the factors of ranks that serve the model; read-only."""
        known = self._known
        if known is not None and known[0] == self._changes and known[1] == model and known[2] is ranks:
            return known[3]
        kind = self._kinds.get(model) or _Kind()
        factors = [self._ranks.get(rank) or kind.factors for rank in ranks]
        prefill, decode = np.array([each.prefill for each in factors]), np.array([each.decode for each in factors])
        prefill.setflags(write=False)
        decode.setflags(write=False)
        columns = RateColumns(prefill, decode, kind.output_tokens)
        self._known = (self._changes, model, ranks, columns)
        return columns

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
        kind = self._kinds.get(expected.model)
        if kind is None:
            kind = self._kinds[expected.model] = _Kind()
        factors = self._ranks.get(expected.rank)
        if factors is None:
            factors = self._ranks[expected.rank] = _Factors(kind.factors.prefill, kind.factors.decode)
        if outcome.ttft_s is not None and expected.ttft_s and self._is_possible(outcome.ttft_s):
            self._learn_prefill(factors, kind.factors, outcome.ttft_s / expected.ttft_s)
        itl_s = outcome.mean_itl_s
        if itl_s is not None and self._is_possible(itl_s):
            self._learn_decode(factors, kind.factors, itl_s / expected.itl_s)
        if outcome.output_tokens:
            tokens = min(float(outcome.output_tokens), OUTPUT_TOKENS_MAX)
            kind.output_tokens += _gain(kind.answers) * (tokens - kind.output_tokens)
            kind.answers += 1
        self._changes += 1

    def _is_possible(self, seconds: float) -> bool:
        is_possible = 0.0 < seconds <= SECONDS_MAX
        self._refused += not is_possible
        return is_possible

    def _learn_prefill(self, rank: _Factors, kind: _Factors, ratio: float) -> None:
        kind.prefill = _within(_nearer(kind.prefill, ratio, kind.prefills), 1.0, KIND_MAX)
        rank.prefill = _within(_nearer(rank.prefill, ratio, rank.prefills), kind.prefill, RANK_MAX)
        kind.prefills += 1
        rank.prefills += 1

    def _learn_decode(self, rank: _Factors, kind: _Factors, ratio: float) -> None:
        kind.decode = _within(_nearer(kind.decode, ratio, kind.decodes), 1.0, KIND_MAX)
        rank.decode = _within(_nearer(rank.decode, ratio, rank.decodes), kind.decode, RANK_MAX)
        kind.decodes += 1
        rank.decodes += 1

    def statistics(self) -> RatesStatistics:
        """Return all factors, and the number of refused measurements."""
        return RatesStatistics(
            {rank: (each.prefill, each.decode) for rank, each in self._ranks.items()},
            {model: kind.output_tokens for model, kind in self._kinds.items()},
            self._refused,
        )

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left or restarted. Its model's factors stay, and begin those of the next."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            del self._ranks[rank]
        for decision_id in [each for each, known in self._pending.items() if known.rank.worker_id == worker_id]:
            del self._pending[decision_id]
        self._changes += 1

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> RatesTotals:
        """Return the row for a checkpoint."""
        return RatesTotals(self._refused)

    def restore_totals(self, row: RatesTotals) -> None:
        """Restore the total from the row."""
        self._refused = row.refused_total

    def kind_rows(self) -> list[KindRatesRow]:
        """Return the rows of models for a checkpoint."""
        return [
            KindRatesRow(
                model,
                kind.factors.prefill,
                kind.factors.decode,
                kind.factors.prefills,
                kind.factors.decodes,
                kind.output_tokens,
                kind.answers,
            )
            for model, kind in self._kinds.items()
        ]

    def restore_kind(self, row: KindRatesRow) -> None:
        """Restore a model from the row."""
        kind = self._kinds[row.model] = _Kind()
        factors = kind.factors
        factors.prefill, factors.decode, factors.prefills, factors.decodes = row[1:5]
        kind.output_tokens, kind.answers = row.output_tokens, row.answers
        self._changes += 1

    def rank_rows(self) -> list[RankRatesRow]:
        """Return the rows of ranks for a checkpoint."""
        return [
            RankRatesRow(rank, each.prefill, each.decode, each.prefills, each.decodes)
            for rank, each in self._ranks.items()
        ]

    def restore_rank(self, row: RankRatesRow) -> None:
        """Restore a rank from the row."""
        factors = self._ranks[row.rank] = _Factors(row.prefill, row.decode)
        factors.prefills, factors.decodes = row.prefills, row.decodes
        self._changes += 1

    def expected_rows(self) -> list[ExpectedRow]:
        """Return the decisions without an outcome, for a checkpoint."""
        return list(self._pending.values())

    def restore_expected(self, row: ExpectedRow) -> None:
        """Restore a decision without an outcome."""
        self._pending[row.decision_id] = row


def _gain(measurements: int) -> float:
    return max(1.0 / (measurements + GAIN_FIRST), GAIN)


def _nearer(factor: float, ratio: float, measurements: int) -> float:
    near = min(max(ratio, factor / RATIO_MAX), factor * RATIO_MAX)
    return factor + _gain(measurements) * (near - factor)


def _within(factor: float, middle: float, span: float) -> float:
    return min(max(factor, middle / span), middle * span)
