"""What other policies would have chosen in the places of a journal, as figures, and how sure they are.

    differ      share of decisions in which the policy's choice is another rank
    hit rate    blocks that the chosen ranks held on their GPUs, as tokens, of all prompt tokens
    imbalance   uncached prompt tokens of the rank that got most, divided by the mean over all ranks
    cost        mean cost of the choices, in ms by the policy's own weights: not comparable between other weights

All policies are compared over the decisions for which each of them has a choice. Leases and answers stay as recorded:
a policy is asked one decision at a time, so what its own placement would have cached later is not in the figures.

The interval of a hit rate's difference from the recorded one is a bootstrap: the decisions in `BLOCKS` blocks of equal
length in time's order, drawn with replacement `DRAWS` times with `SEED`; the 2.5th to the 97.5th percentile.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import choice_index, splitmix64
from router.decision.report import aligned
from router.decision.verdict import Verdict
from router.journal.replay import Redecided

BLOCKS, DRAWS, SEED = 40, 1000, 1
_INTERVAL = (2.5, 97.5)


class VariantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one policy; None where there is nothing to count. Costs in both units have no mean."""

    name: str
    differ: float
    hit_rate: float | None
    gain: tuple[float, float, float] | None
    """Of the hit rate against the recorded one: difference, and the ends of its interval. None: of the recorded."""
    imbalance: float | None
    cost: float | None


class WhatIf:
    """Counts choices. `names` are those of the other policies, in the order of `Redecided.otherwise`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._columns = [_Choices(name) for name in ("recorded", *names)]
        self._tokens: list[int] = []
        self._ranks = set[WorkerRank]()
        self.left_out = self.without_overlap = self.without_rates = 0
        """Decisions that are not compared, because a policy has no choice; compared ones without recorded overlap; and
        compared ones in a mode that learns no rates: a policy with costs in ms takes factors of 1 there."""

    @property
    def compared(self) -> int:
        """How many decisions are compared."""
        return len(self._tokens)

    def add(self, found: Redecided) -> None:
        """Count a decision that was taken again."""
        choices = found.verdict, *found.otherwise
        chosen = [each for each in choices if isinstance(each, Verdict)]
        if len(chosen) < len(choices):
            self.left_out += 1
            return
        recorded, request = chosen[0], chosen[0].request
        self.without_overlap += recorded.is_blank
        self.without_rates += not recorded.is_timed and any(each.is_timed for each in chosen)
        self._tokens.append(request.isl_tokens)
        self._ranks.update(recorded.ranks)
        for column, verdict in zip(self._columns, chosen, strict=True):
            cached = min(verdict.overlap_blocks * request.block_size, request.isl_tokens)
            column.differ += verdict.winner != recorded.winner
            column.cached.append(cached)
            column.uncached[verdict.winner] += request.isl_tokens - cached
            if verdict.is_timed:
                column.costs.append(verdict.cost_list()[verdict.winner_at])

    def figures(self) -> list[VariantFigures]:
        """Return the recorded choices' figures, then those of the policies."""
        return [self._figures(each) for each in self._columns]

    def _figures(self, column: "_Choices") -> VariantFigures:
        recorded, tokens = self._columns[0], self._tokens
        most, uncached = max(column.uncached.values(), default=0), column.uncached.total()
        return VariantFigures(
            name=column.name,
            differ=column.differ / max(1, len(tokens)),
            hit_rate=sum(column.cached) / sum(tokens) if sum(tokens) else None,
            gain=None if column is recorded or not sum(tokens) else _gain(column.cached, recorded.cached, tokens),
            imbalance=most * len(self._ranks) / uncached if uncached else None,
            cost=sum(column.costs) / len(column.costs) if column.costs else None,
        )


class _Choices:
    """The choices of one policy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.differ = 0
        self.cached: list[int] = []
        self.uncached = Counter[WorkerRank]()
        self.costs: list[float] = []


def _gain(cached: Sequence[int], before: Sequence[int], tokens: Sequence[int]) -> tuple[float, float, float]:
    more = np.array(cached, dtype=np.float64) - np.array(before, dtype=np.float64)
    count = min(BLOCKS, len(more))
    gained = np.array([block.sum() for block in np.array_split(more, count)])
    asked = np.array([block.sum() for block in np.array_split(np.array(tokens, dtype=np.float64), count)])
    drawn = [[choice_index(splitmix64(SEED + draw), count, at) for at in range(count)] for draw in range(DRAWS)]
    shares = [gained[each].sum() / max(1.0, asked[each].sum()) for each in drawn]
    low, high = np.percentile(shares, _INTERVAL).tolist()
    return float(more.sum() / sum(tokens)), low, high


# -------------------------------------------------------------------------------------------------------- for people


def what_if_lines(figures: Sequence[VariantFigures], found: WhatIf) -> list[str]:
    """Return a table, what it does not say, and advice."""
    header = ["policy", "differ", "hit rate", "against recorded, 95%", "imbalance", "mean cost"]
    return [*aligned([header, *map(_row, figures)], len(header)), *_notes(found), advice(figures)]


def _row(each: VariantFigures) -> list[str]:
    gain = "-" if each.gain is None else f"{_points(each.gain[0])}, {_interval(each.gain)}"
    return [
        each.name,
        f"{each.differ:.1%}",
        "-" if each.hit_rate is None else f"{each.hit_rate:.1%}",
        gain,
        "-" if each.imbalance is None else f"{each.imbalance:.2f}",
        "-" if each.cost is None else f"{each.cost:.1f} ms",
    ]


def _notes(found: WhatIf) -> list[str]:
    counted = {
        "are not compared: a policy had no choice there": found.left_out,
        "have no recorded overlap: their hit rate counts as 0": found.without_overlap,
        "were taken in a mode that learns no rates: costs in ms have factors of 1 for speed there": found.without_rates,
    }
    notes = [f"note: {count} decisions {words}" for words, count in counted.items() if count]
    method = f"bootstrap of {BLOCKS} blocks of decisions in time's order at most, {DRAWS} draws, seed {SEED}"
    return [f"{found.compared} decisions compared; intervals: {method}", *notes]


def advice(figures: Sequence[VariantFigures]) -> str:
    """Return what the figures are a reason for. A hit rate counts as better if its interval is above 0."""
    recorded, *others = figures
    better = [each for each in others if each.gain is not None and each.gain[1] > 0]
    if not better:
        return "Advice: keep the recorded policy, no other has a higher predicted hit rate beyond its interval."
    best = max(better, key=lambda each: each.gain[0] if each.gain else 0.0)
    assert best.gain is not None
    gained = f"{_points(best.gain[0])} of predicted hit rate ({_interval(best.gain)})"
    loads = f"imbalance {best.imbalance or 0.0:.2f}, recorded {recorded.imbalance or 0.0:.2f}"
    limit = "the engines' latency is not in these figures"
    return f"Advice: try {best.name}, it has {gained}, {loads}; {limit}."


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def _interval(gain: tuple[float, float, float]) -> str:
    return f"{100 * gain[1]:+.1f} to {100 * gain[2]:+.1f}"
