"""The modes: pure functions of the candidates, the request, the policy and the seed, and what each reads.

    mode             chooses                                                             reads
    kv               the lowest cost in ms (`time_cost.py`), or by temperature a draw    overlap, load, rates
    predicted-ttft   the smallest predicted time to the first token among those that     overlap, load, rates
                     meet the targets; of decode workers the smallest between tokens
    round-robin      the candidates in turn                                                nothing
    random           any, by the seed                                                      nothing
    power-of-two     of two that the seed draws, the one with fewer active requests        load
    least-loaded     the fewest active requests, ties by the seed                          load
    direct           the worker named by the client; its ranks in turn                     nothing

A mode that reads no overlap asks no index, and its prompts need not be encoded. Targets are the request's, else the
policy's. If no candidate meets them, all candidates may be chosen, and `policy.unmet` says what happens then.

An embedding reuses no KV prefix: for its requests `least-loaded` takes the place of a mode that reads overlap.

Temperature 0: the lowest cost wins, the seed breaks exact ties. Temperature T > 0: costs are scaled to [0, 1] between
the lowest and the highest, and candidate i is drawn with probability proportional to exp(-cost_i / T).

Soft affinity: the cost of the session's rank is lowered. Hard affinity: that rank wins if it is a candidate. Whether
targets are met is then still said of the rank that the mode chose.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

from msgspec.structs import replace

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import CostTerms
from kv_protocol.openai.endpoints import PROMPT_ENDPOINTS
from kv_protocol.splitmix import choice_index, unit_interval
from router.decision.eligibility import WorkerNotNamed
from router.decision.policy import Policy
from tests.reference.time_cost import predicted_s, terms_in_ms
from tests.reference.view import View


class Choice(NamedTuple):
    """The winner, the next best and by how much more it costs, by their indices among the candidates.

    The next best is the best of the others by what the mode compares: cost, predicted time, active requests (of
    power-of-two: the other of the two). Modes that compare nothing have none.
    """

    winner: int
    reason: str
    runner_up: int | None = None
    margin: float | None = None
    terms: list[CostTerms] | None = None
    """The cost terms of the candidates; None if the mode computes none."""
    meets_targets: bool = True


class Mode(NamedTuple):
    """A function of the view of the candidates alone that chooses, and what it reads of a view."""

    choose: Callable[[View, RouteRequest, Policy, int], Choice]
    reads_overlap: bool = False
    reads_load: bool = False
    reads_rates: bool = False


# ------------------------------------------------------------------------------------------------- choices among costs


def beside(costs: list[float], winner: int) -> tuple[int | None, float | None]:
    """Return the cheapest of the others, the first among equals, and how much more it costs; None if there is none."""
    if len(costs) == 1:
        return None, None
    runner_up = min((at for at in range(len(costs)) if at != winner), key=costs.__getitem__)
    return runner_up, costs[runner_up] - costs[winner]


def lowest(costs: list[float], seed: int) -> int:
    """Return the lowest cost; the seed breaks ties."""
    ties = [at for at, cost in enumerate(costs) if cost == min(costs)]
    return ties[choice_index(seed, len(ties))]


def drawn_by_temperature(costs: list[float], temperature: float, seed: int) -> int:
    """Return a cost that the seed draws."""
    least, span = min(costs), max(costs) - min(costs)
    if span == 0:
        return choice_index(seed, len(costs))
    total, weights = 0.0, list[float]()
    for cost in costs:
        weights.append(math.exp(-(cost - least) / span / temperature))
        total += weights[-1]  # `sum` adds up differently in other versions of Python
    point = unit_interval(seed) * total
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return len(costs) - 1


# ------------------------------------------------------------------------------------------------- modes


def _preference(taints: tuple[str, ...], preferred: tuple[tuple[str, float], ...]) -> float:
    """Return the factor of the cost of a worker with these taints, by the sum of the weights of those preferred."""
    return math.exp(-math.tanh(math.fsum(weight for taint, weight in preferred if taint in taints)))


def _terms(view: View, request: RouteRequest, policy: Policy) -> list[CostTerms]:
    """Return the cost terms."""
    factors = [_preference(each.taints, request.preferred_taints) for each in view.registrations]
    if policy.affinity == "soft" and view.bound in view.ranks:
        factors[view.ranks.index(view.bound)] *= 1.0 - policy.affinity_discount
    assert view.output_tokens is not None
    return terms_in_ms(view.rows, request, policy, factors, view.output_tokens)


def _by_cost(view: View, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    terms = _terms(view, request, policy)
    costs = [each.cost for each in terms]
    is_drawn = policy.temperature > 0
    winner = drawn_by_temperature(costs, policy.temperature, seed) if is_drawn else lowest(costs, seed)
    runner_up, margin = beside(costs, winner)
    reason = "load"
    if runner_up is None or margin is None:
        reason = "only"
    elif margin <= 0:
        reason = "draw"
    elif _is_by_affinity(view, winner, costs[winner], margin, policy):
        reason = "affinity"
    elif terms[winner].overlap_credit_blocks > terms[runner_up].overlap_credit_blocks:
        reason = "overlap"
    return Choice(winner, reason, runner_up, margin, terms)


def _is_by_affinity(view: View, winner: int, cost: float, margin: float, policy: Policy) -> bool:
    """Return whether the winner is its session's rank, and wins only by that."""
    is_bound = policy.affinity == "soft" and view.ranks[winner] == view.bound
    return is_bound and cost > (cost + margin) * (1.0 - policy.affinity_discount)


def _soonest(view: View, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    terms, every = _terms(view, request, policy), range(len(view.rows))
    assert view.output_tokens is not None
    predicted = [
        predicted_s(row, each, request, view.output_tokens) for row, each in zip(view.rows, terms, strict=True)
    ]
    seconds = [
        (ttft_s if ttft_s is not None else cast("float", itl_s)) * each.constraint_multiplier
        for (ttft_s, itl_s), each in zip(predicted, terms, strict=True)
    ]
    itl_target_s = policy.itl_target_s if request.itl_target_s is None else request.itl_target_s
    ttft_target_s = policy.ttft_target_s if request.ttft_target_s is None else request.ttft_target_s
    meets = [_meets(itl_s, itl_target_s) and _meets(ttft_s, ttft_target_s) for ttft_s, itl_s in predicted]
    allowed = [at for at in every if meets[at]] or list(every)
    winner = allowed[lowest([seconds[at] for at in allowed], seed)]
    others = [at for at in allowed if at != winner] or [at for at in every if at != winner]
    if not others:
        return Choice(winner, "only", None, None, terms, meets[winner])
    runner_up = min(others, key=seconds.__getitem__)
    margin = terms[runner_up].cost - terms[winner].cost
    return Choice(winner, "predicted_ttft", runner_up, margin, terms, meets[winner])


def _meets(seconds: float | None, target_s: float | None) -> bool:
    return seconds is None or target_s is None or seconds <= target_s


def _in_turn(view: View, _request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
    return Choice(view.turn % len(view.rows), "turn")


def _drawn(view: View, _request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    return Choice(choice_index(seed, len(view.rows)), "draw")


def _of_two(view: View, _request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    count = len(view.rows)
    if count == 1:
        return Choice(0, "only")
    first = choice_index(seed, count)
    second = choice_index(seed, count - 1, draw=1)
    second += second >= first
    fewer = view.rows[second].active_requests < view.rows[first].active_requests
    return Choice(second, "load", first) if fewer else Choice(first, "load", second)


def _least_loaded(view: View, _request: RouteRequest, _policy: Policy, seed: int) -> Choice:
    active = [float(row.active_requests) for row in view.rows]
    winner = lowest(active, seed)
    runner_up, margin = beside(active, winner)
    return Choice(winner, "only" if margin is None else "load" if margin else "draw", runner_up)


def _as_pinned(view: View, request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
    if request.pinned_worker is None:
        raise WorkerNotNamed(tuple(dict.fromkeys(rank.worker_id for rank in view.ranks)))
    return Choice(view.turn % len(view.rows), "pinned")


MODES: dict[str, Mode] = {
    "kv": Mode(_by_cost, reads_overlap=True, reads_load=True, reads_rates=True),
    "predicted-ttft": Mode(_soonest, reads_overlap=True, reads_load=True, reads_rates=True),
    "round-robin": Mode(_in_turn),
    "random": Mode(_drawn),
    "power-of-two": Mode(_of_two, reads_load=True),
    "least-loaded": Mode(_least_loaded, reads_load=True),
    "direct": Mode(_as_pinned),
}


def policy_for(policy: Policy, request: RouteRequest) -> Policy:
    """Return the policy that chooses a worker for the request: that of its phase, by load if it has no prompt."""
    of_phase = policy.of(request.phase)
    if request.endpoint in PROMPT_ENDPOINTS or not MODES[of_phase.mode].reads_overlap:
        return of_phase
    return replace(of_phase, mode="least-loaded")


def choose(view: View, request: RouteRequest, policy: Policy, seed: int) -> Choice:
    """Return the mode's choice. Under hard affinity a session's rank wins if it is a candidate."""
    mode = MODES[policy.mode]
    choice = mode.choose(view, request, policy, seed)
    if policy.affinity != "hard" or view.bound not in view.ranks:
        return choice
    winner = view.ranks.index(view.bound)
    if winner == choice.winner or choice.runner_up is None:
        return choice._replace(winner=winner, reason="affinity")
    if choice.terms is None:
        return choice._replace(winner=winner, reason="affinity", runner_up=choice.winner)
    costs = [each.cost for each in choice.terms]
    runner_up = choice.winner if mode.choose is _soonest else beside(costs, winner)[0]
    margin = None if runner_up is None else costs[runner_up] - costs[winner]
    return choice._replace(winner=winner, reason="affinity", runner_up=runner_up, margin=margin)
