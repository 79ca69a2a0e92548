"""What another policy would have chosen at the recorded moments, and what it would have gained there. Pure.

Gains are of the other choice against the recorded one, so that above 0 speaks for the other policy:

    ttft_gain_s       predicted TTFT of the recorded choice minus that of the other's: the reference engine's time for
                      queue and prompt, times the rank's learnt factor. No policy's weights are in it
    live_cost_gain    cost of the recorded choice minus that of the other's, by the recorded policy's cost and in its
                      unit: never above 0 without a temperature

What the other policy's own choices would have cached or loaded is in none of them.
"""

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from bench.what_if.series import Series, SeriesMean
from router.decision.state import RouterState
from router.decision.verdict import Verdict


class ScreeningReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy: the fields in which it differs from the recorded one, and its figures. Costs are by unit."""

    policy: dict[str, Any]
    decisions: int
    differ: int
    skipped: dict[str, int]
    ttft_gain_s: SeriesMean
    live_cost_gain: dict[str, SeriesMean]

    @property
    def differ_ratio(self) -> float:
        """Share of the decisions that are for another rank than the recorded one."""
        return self.differ / max(1, self.decisions)


class Tally:
    """The decisions of a policy that differs from the recorded one in `fields`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._decisions = self._differ = 0
        self._skipped = Counter[str]()
        self._ttft_gain = Series()
        self._cost_gains: dict[str, Series] = {}

    def skip(self, reason: str) -> None:
        """The policy took no decision at a recorded moment."""
        self._skipped[reason] += 1

    def add(self, state: RouterState, recorded: Verdict, other: Verdict) -> None:
        """Count a decision of the policy for the request of `recorded`, at the same moment of `state`."""
        places = recorded.place, other.place
        self._decisions += 1
        self._differ += places[0] != places[1]
        if recorded.request.isl_tokens and not recorded.is_blank:
            factors = np.frombuffer(recorded.factors("prefill") or state.core.prefill_factors(recorded))
            ours, its = (state.core.expected_s(recorded, place)[0] * float(factors[place]) for place in places)
            self._ttft_gain.add(ours - its)
        indices = recorded.rank_indices
        if recorded.has_costs and all(place in indices for place in places):
            costs = recorded.cost_list()
            ours, its = (costs[indices.index(place)] for place in places)
            self._cost_gains.setdefault(recorded.cost_unit, Series()).add(ours - its)

    def report(self) -> ScreeningReport:
        """Return the figures."""
        return ScreeningReport(
            policy=self._fields,
            decisions=self._decisions,
            differ=self._differ,
            skipped=dict(self._skipped),
            ttft_gain_s=self._ttft_gain.mean(),
            live_cost_gain={unit: series.mean() for unit, series in self._cost_gains.items()},
        )
