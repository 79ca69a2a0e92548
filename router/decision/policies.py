"""The modes: pure functions `(candidates, request, policy, seed) -> Choice`, and what each reads.

    mode             chooses                                                             reads
    kv               the lowest cost in ms (`time_cost.py`), or by temperature a draw      overlap, load, rates
                     (`choice.py`)
    kv-blocks        the same, in blocks (`cost.py`)                                       overlap, load
    predicted-ttft   the smallest predicted time to the first token among those whose      overlap, load, forecast
                     predicted time between tokens meets the target
    round-robin      the candidates in turn                                                nothing
    random           any, by the seed                                                      nothing
    power-of-two     of two that the seed draws, the one with fewer active requests        load
    least-loaded     the fewest active requests, ties by the seed                          load
    direct           the worker named by the client; its ranks in turn                     nothing

A mode that reads no overlap asks no index, and its prompts need not be encoded. Targets are the request's, else the
policy's. If no candidate meets them, all candidates may be chosen, and `policy.unmet` says what happens then.

An embedding reuses no KV prefix: for its requests `least-loaded` takes the place of a mode that reads overlap.

A user's mode is a function of the same shape (`router/decision/policy_loader.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kv_protocol.openai.endpoints import PROMPT_ENDPOINTS
from kv_protocol.splitmix import choice_index
from router.decision.choice import beside, choose
from router.decision.cost import CostColumns, cost_columns
from router.decision.eligibility import multipliers
from router.decision.errors import WorkerNotNamed
from router.decision.policy import CostParameters, Policy
from router.decision.time_cost import time_columns
from router.decision.verdict import Reason
from router.decision.view import Floats, Forecast, RouteRequest, View

__all__ = ["MODES", "Candidates", "Choice", "CostParameters", "Mode", "Policy", "choose_by", "policy_for"]


class Candidates(NamedTuple):
    """The ranks of a view that may take the request, by their indices in it, ascending; at least one."""

    view: View
    rank_indices: Sequence[int]

    @property
    def columns(self) -> View:
        """The view of the candidates alone."""
        return self.view if len(self.rank_indices) == len(self.view.ranks) else self.view.only(self.rank_indices)


class Choice(NamedTuple):
    """The winner, the next best and by how much more it costs, by their indices among the candidates.

    The next best is the best of the others by what the mode compares: cost, predicted time, active requests (of
    power-of-two: the other of the two). Modes that compare nothing have none.
    """

    winner: int
    reason: Reason
    runner_up: int | None = None
    margin: float | None = None
    costs: CostColumns | None = None
    """The cost terms of the candidates; None if the mode computes none."""
    meets_targets: bool = True


ModeFunction = Callable[[Candidates, RouteRequest, Policy, int], Choice]


class Mode(NamedTuple):
    """A function that chooses, and the columns of a view that it reads; the other columns may be blank."""

    choose: ModeFunction
    reads_overlap: bool = False
    reads_load: bool = False
    reads_forecast: bool = False
    reads_rates: bool = False


def _by_cost(candidates: Candidates, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    if policy.cost == "blocks":  # of a journal
        return _by_blocks(candidates, request, policy, seed)
    view = candidates.columns
    costs = time_columns(view, request, policy, _multiplier(view, request, policy))
    return _cheapest(view, costs, policy, seed)


def _by_blocks(candidates: Candidates, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    view = candidates.columns
    costs = cost_columns(view, request, policy, _multiplier(view, request, policy))
    return _cheapest(view, costs, policy, seed)


def _cheapest(view: View, costs: CostColumns, policy: Policy, seed: int) -> Choice:
    winner, runner_up, margin = choose(costs.costs(), policy.temperature, seed)
    reason: Reason = "load"
    if runner_up is None or margin is None:
        reason = "only"
    elif margin <= 0:
        reason = "draw"
    elif _is_by_affinity(view, winner, margin, costs, policy):
        reason = "affinity"
    elif costs.has_more_credit(winner, runner_up):
        reason = "overlap"
    return Choice(winner, reason, runner_up, margin, costs)


def _multiplier(view: View, request: RouteRequest, policy: Policy) -> Floats | None:
    multiplier = multipliers(view, request)
    if policy.affinity != "soft" or view.bound not in view.ranks:
        return multiplier
    if multiplier is None:
        multiplier = np.ones(len(view.ranks))
    multiplier[view.ranks.index(view.bound)] *= 1.0 - policy.affinity_discount
    return multiplier


def _is_by_affinity(view: View, winner: int, margin: float, costs: CostColumns, policy: Policy) -> bool:
    """Return whether the winner is its session's rank, and wins only by that."""
    if policy.affinity != "soft" or view.ranks[winner] != view.bound:
        return False
    cost = costs.costs()[winner]
    return cost > (cost + margin) * (1.0 - policy.affinity_discount)


def _by_forecast(candidates: Candidates, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    view = candidates.columns
    assert view.forecast is not None, "the view was made for another mode"
    costs = cost_columns(view, request, policy, _multiplier(view, request, policy))
    allowed = _meeting(view.forecast, request, policy)
    ttft_s, multiplier = view.forecast.ttft_s, costs.constraint_multiplier
    if multiplier is not None:
        ttft_s = ttft_s * multiplier
    seconds = (ttft_s if allowed is None or not allowed.any() else np.where(allowed, ttft_s, np.inf)).tolist()
    winner, runner_up, _ = choose(seconds, 0.0, seed)
    if runner_up is not None and math.isinf(seconds[runner_up]):  # no other candidate meets the targets
        runner_up = beside(ttft_s.tolist(), winner).runner_up
    margin = None if runner_up is None else float(costs.cost[runner_up] - costs.cost[winner])
    reason: Reason = "only" if runner_up is None else "predicted_ttft"
    return Choice(winner, reason, runner_up, margin, costs, allowed is None or bool(allowed[winner]))


def _meeting(forecast: Forecast, request: RouteRequest, policy: Policy) -> NDArray[np.bool_] | None:
    """Return which candidates are predicted to meet the targets; None if there are none."""
    itl_s = policy.itl_target_s if request.itl_target_s is None else request.itl_target_s
    ttft_s = policy.ttft_target_s if request.ttft_target_s is None else request.ttft_target_s
    if itl_s is None:
        return None if ttft_s is None else forecast.ttft_s <= ttft_s
    meets = forecast.itl_s <= itl_s
    return meets if ttft_s is None else meets & (forecast.ttft_s <= ttft_s)


def _in_turn(candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
    return Choice(candidates.view.turn % len(candidates.rank_indices), "turn")


def _drawn(candidates: Candidates, _request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    return Choice(choice_index(seed, len(candidates.rank_indices)), "draw")


def _of_two(candidates: Candidates, _request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    count, active = len(candidates.rank_indices), candidates.view.active_requests
    if count == 1:
        return Choice(0, "only")
    first = choice_index(seed, count)
    second = choice_index(seed, count - 1, draw=1)
    second += second >= first
    fewer = active[candidates.rank_indices[second]] < active[candidates.rank_indices[first]]
    return Choice(second, "load", first) if fewer else Choice(first, "load", second)


def _least_loaded(candidates: Candidates, _request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    active = candidates.view.active_requests.tolist()
    winner, runner_up, margin = choose([float(active[place]) for place in candidates.rank_indices], 0.0, seed)
    return Choice(winner, "only" if margin is None else "load" if margin else "draw", runner_up)


def _as_pinned(candidates: Candidates, request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
    if request.pinned_worker is None:
        ids = (candidates.view.ranks[place].worker_id for place in candidates.rank_indices)
        raise WorkerNotNamed(tuple(dict.fromkeys(ids)))
    return Choice(candidates.view.turn % len(candidates.rank_indices), "pinned")


MODES: dict[str, Mode] = {
    "kv": Mode(_by_cost, reads_overlap=True, reads_load=True, reads_rates=True),
    "kv-blocks": Mode(_by_blocks, reads_overlap=True, reads_load=True),
    "predicted-ttft": Mode(_by_forecast, reads_overlap=True, reads_load=True, reads_forecast=True),
    "round-robin": Mode(_in_turn),
    "random": Mode(_drawn),
    "power-of-two": Mode(_of_two, reads_load=True),
    "least-loaded": Mode(_least_loaded, reads_load=True),
    "direct": Mode(_as_pinned),
}


def policy_for(policy: Policy, request: RouteRequest, modes: Mapping[str, Mode]) -> Policy:
    """Return the policy that chooses a worker for the request: that of its phase, by load if it has no prompt."""
    of_phase = policy.of(request.phase) if request.phase in ("prefill", "decode") else policy
    if request.endpoint in PROMPT_ENDPOINTS or not modes[of_phase.mode].reads_overlap:
        return of_phase
    return _by_load(of_phase)


@lru_cache(maxsize=16)
def _by_load(policy: Policy) -> Policy:
    return replace(policy, mode="least-loaded")


def choose_by(mode: Mode, candidates: Candidates, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    """Return the mode's choice. Under hard affinity a session's rank wins if it is a candidate."""
    choice = mode.choose(candidates, request, policy, seed)
    if policy.affinity != "hard" or candidates.view.bound not in candidates.view.ranks:
        return choice
    bound = candidates.view.bound
    place = candidates.view.ranks.index(bound)
    if place not in candidates.rank_indices:
        return choice
    winner = candidates.rank_indices.index(place)
    if winner == choice.winner or choice.runner_up is None:
        return choice._replace(winner=winner, reason="affinity")
    if choice.costs is None:
        return choice._replace(winner=winner, reason="affinity", runner_up=choice.winner)
    costs = choice.costs.costs()
    runner_up = choice.winner if mode.reads_forecast else beside(costs, winner).runner_up
    margin = None if runner_up is None else costs[runner_up] - costs[winner]
    return choice._replace(winner=winner, reason="affinity", runner_up=runner_up, margin=margin)
