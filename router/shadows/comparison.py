"""What another policy chooses in the place of a live decision, and what both choices are worth. Pure.

    the shadow reads     the view of the live decision, its request, its seed: the same moment, the same draw
    it cannot read       what the live policy did not read (`unreadable`): then it takes no decision
    it changes           nothing: the next view is that after the live decision. What its own choices would have cached
                         or loaded is not in its figures

Each value is that at the rank of the live choice, then that at the rank of the shadow's:

    TTFT       the reference engine's time for queue and prompt, times the rank's factor (`router/fleet/rates.py`): no
               policy's weights are in it, so that all policies are comparable
    cached     leading blocks that the rank is expected to hold of those that can be reused
    costs      under the live policy's cost, and under the shadow's own; None if a policy has none there
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from kv_protocol.decision import CostUnit
from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import WorkerRank
from router.decision.decide import decide
from router.decision.errors import NoEligibleWorker, WorkerNotNamed
from router.decision.policies import Mode, policy_for
from router.decision.policy import Policy
from router.decision.time_cost import expected_of
from router.decision.verdict import Verdict
from router.decision.view import RouteRequest, View
from router.fleet.rates import RateColumns

RatesOf = Callable[[str, tuple[WorkerRank, ...], float], RateColumns]
"""The factors of a model's ranks at a time; they are 1 where none were learnt."""
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


def compared(
    verdict: Verdict, live: Policy, shadow: Policy, modes: Mapping[str, Mode], rates_of: RatesOf
) -> Comparison:
    """Return the shadow's choice for the request of `verdict`, which the policy `live` decided.

    Raises:
        NoChoice: the view lacks what the shadow reads, or the shadow finds no rank.
    """
    request = verdict.request
    view = readable_view(verdict, live, shadow, modes, rates_of)
    try:
        other = decide(view, request, shadow, verdict.seed, modes)
    except (NoEligibleWorker, WorkerNotNamed, LimitExceeded) as error:
        raise NoChoice("no_choice", str(error)) from error
    return of_verdicts(verdict, other, rates_of)


def of_verdicts(verdict: Verdict, other: Verdict, rates_of: RatesOf) -> Comparison:
    """Return the comparison of a live decision with another policy's for the same request at the same moment."""
    view, request = verdict.view, verdict.request
    places = verdict.rank_indices[verdict.winner_at], other.rank_indices[other.winner_at]
    is_predicted = bool(request.isl_tokens) and not view.is_blank
    return Comparison(
        rank=other.winner,
        agrees=places[0] == places[1],
        ttft_s=_ttft_s(view, request, places, rates_of) if is_predicted else None,
        cached_blocks=_cached_blocks(view, request, places) if is_predicted else None,
        live_cost=_costs(verdict, places),
        own_cost=_costs(other, places),
    )


def readable_view(verdict: Verdict, live: Policy, shadow: Policy, modes: Mapping[str, Mode], rates_of: RatesOf) -> View:
    """Return the live decision's view as the shadow reads it; raise `NoChoice` if it lacks a column."""
    view, request = verdict.view, verdict.request
    policy = policy_for(shadow, request, modes)
    mode, live_mode = modes[policy.mode], modes[verdict.policy]
    lacking = [
        name
        for name, is_lacking in (
            ("overlap", mode.reads_overlap and view.is_blank),
            ("load", mode.reads_load and not (live_mode.reads_load or live_mode.reads_overlap)),
            ("forecast", mode.reads_forecast and view.forecast is None),
            ("session", policy.affinity != "off" and live.affinity == "off" and bool(request.session_id)),
            ("predictions", mode.reads_overlap and shadow.predict_on_route and not live.predict_on_route),
        )
        if is_lacking
    ]
    if lacking:
        raise NoChoice("unreadable", f"mode {verdict.policy} reads no {', '.join(lacking)}")
    if view.rates is None and mode.reads_rates and policy.cost == "ms":
        view = view._replace(rates=rates_of(request.model, view.ranks, view.now_s))
    if live.predict_on_route and not shadow.predict_on_route:
        view = view._replace(predicted=np.zeros_like(view.predicted))
    return view


def _ttft_s(view: View, request: RouteRequest, places: tuple[int, int], rates_of: RatesOf) -> Pair:
    rates = view.rates or rates_of(request.model, view.ranks, view.now_s)
    live, shadow = [expected_of(view, request, place).ttft_s * float(rates.prefill[place]) for place in places]
    return live, shadow


def _cached_blocks(view: View, request: RouteRequest, places: tuple[int, int]) -> tuple[int, int]:
    held = [max(int(view.overlap[0, place]), int(view.predicted[place])) for place in places]
    return min(held[0], request.reusable_blocks), min(held[1], request.reusable_blocks)


def _costs(verdict: Verdict, places: tuple[int, int]) -> CostPair | None:
    if verdict.costs is None or not all(place in verdict.rank_indices for place in places):
        return None
    costs = verdict.costs.costs()
    live, shadow = [costs[verdict.rank_indices.index(place)] for place in places]
    return CostPair(verdict.costs.unit, (live, shadow))
