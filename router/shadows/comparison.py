"""What another policy chooses in the place of a live decision, and what both choices are worth. Pure.

    the shadow reads     the view of the live decision, its request, its seed: the same moment, the same draw
    it cannot read       what the live policy did not read (`unreadable`): then it takes no decision
    it changes           nothing: the next view is that after the live decision. What its own choices would have cached
                         or loaded is not in its figures

Each value is that at the rank of the live choice, then that at the rank of the shadow's:

    TTFT       the reference engine's time for queue and prompt, times the rank's learnt factor: no
               policy's weights are in it, so that all policies are comparable
    cached     leading blocks that the rank is expected to hold of those that can be reused
    costs      under the live policy's cost, and under the shadow's own; None if a policy has none there
"""

from typing import NamedTuple

import numpy as np

from kv_protocol.decision import CostUnit
from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import WorkerRank
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.verdict import Verdict

Pair = tuple[float, float]


class CostPair(NamedTuple):
    """The costs of both choices under one policy."""

    unit: CostUnit
    costs: Pair


class Comparison(NamedTuple):
    """A shadow's choice beside the live one. None: the view does not tell."""

    rank: WorkerRank
    agrees: bool
    ttft_s: Pair | None
    cached_blocks: tuple[int, int] | None
    live_cost: CostPair | None
    own_cost: CostPair | None


class NoChoice(Exception):
    """The shadow takes no decision for this request; `reason` is unreadable or no_choice."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def compared(state: RouterState, verdict: Verdict, live: Policy, shadow: Policy) -> Comparison:
    """Return the shadow's choice for the request of `verdict`, which the policy `live` decided.

    Raises:
        NoChoice: the decision lacks what the shadow reads, or the shadow finds no rank.
    """
    if lacking := _lacking(state, verdict, live, shadow):
        raise NoChoice("unreadable", f"mode {verdict.policy} reads no {', '.join(lacking)}")
    try:
        other = state.decide_instead(verdict, shadow)
    except (NoEligibleWorker, WorkerNotNamed, LimitExceeded) as error:
        raise NoChoice("no_choice", str(error)) from error
    return of_verdicts(state, verdict, other)


def of_verdicts(state: RouterState, verdict: Verdict, other: Verdict) -> Comparison:
    """Return the comparison of a live decision with another policy's for the same request at the same moment."""
    places = verdict.place, other.place
    is_predicted = bool(verdict.request.isl_tokens) and not verdict.is_blank
    return Comparison(
        rank=other.winner,
        agrees=places[0] == places[1],
        ttft_s=_ttft_s(state, verdict, places) if is_predicted else None,
        cached_blocks=_cached_blocks(verdict, places) if is_predicted else None,
        live_cost=_costs(verdict, places),
        own_cost=_costs(other, places),
    )


def _lacking(state: RouterState, verdict: Verdict, live: Policy, shadow: Policy) -> list[str]:
    """Return what the shadow reads and the live decision did not."""
    policy, mode, _ = state.rules.of(shadow, verdict.request)
    live_mode = state.modes[verdict.policy]
    return [
        name
        for name, is_lacking in (
            ("overlap", mode.reads_overlap and verdict.is_blank),
            ("load", mode.reads_load and not (live_mode.reads_load or live_mode.reads_overlap)),
            ("forecast", mode.reads_forecast and not live_mode.reads_forecast),
            ("session", policy.affinity != "off" and live.affinity == "off" and bool(verdict.request.session_id)),
            ("predictions", mode.reads_overlap and shadow.predict_on_route and not live.predict_on_route),
        )
        if is_lacking
    ]


def _ttft_s(state: RouterState, verdict: Verdict, places: tuple[int, int]) -> Pair:
    factors = np.frombuffer(verdict.column("prefill") or state.core.prefill_factors(verdict))
    live, shadow = (state.core.expected_s(verdict, place)[0] * float(factors[place]) for place in places)
    return live, shadow


def _cached_blocks(verdict: Verdict, places: tuple[int, int]) -> tuple[int, int]:
    expected, reusable = verdict.expected, verdict.request.reusable_blocks
    return min(int(expected[places[0]]), reusable), min(int(expected[places[1]]), reusable)


def _costs(verdict: Verdict, places: tuple[int, int]) -> CostPair | None:
    indices = verdict.rank_indices
    if not verdict.has_costs or not all(place in indices for place in places):
        return None
    costs = verdict.cost_list()
    live, shadow = (costs[indices.index(place)] for place in places)
    return CostPair(verdict.cost_unit, (live, shadow))
