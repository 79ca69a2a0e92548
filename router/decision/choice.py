"""Chooses among costs, reproducibly: the seed decides between equal ones, or draws by temperature.

Temperature 0: the lowest cost wins, the seed breaks exact ties. Temperature T > 0: costs are scaled to [0, 1] between
the lowest and the highest, and candidate i is drawn with probability proportional to exp(-cost_i / T).
"""

import math
from typing import NamedTuple

from kv_protocol.splitmix import choice_index, unit_interval


class CostChoice(NamedTuple):
    """Indices of the winner and of the cheapest other candidate, and how much more the latter costs."""

    winner: int
    runner_up: int | None
    margin: float | None


def choose(costs: list[float], temperature: float, seed: int) -> CostChoice:
    """Return the choice among one or more costs."""
    return beside(costs, _lowest(costs, seed) if temperature <= 0 else _sampled(costs, temperature, seed))


def beside(costs: list[float], winner: int) -> CostChoice:
    """Return the choice of `winner`, with the cheapest of the others, the first among equals."""
    if len(costs) == 1:
        return CostChoice(winner, None, None)
    own, costs[winner] = costs[winner], math.inf
    second = min(costs)
    runner_up = costs.index(second)
    if runner_up == winner:  # all others are infinite
        runner_up = 0 if winner else 1
    costs[winner] = own
    return CostChoice(winner, runner_up, second - own)


def _lowest(costs: list[float], seed: int) -> int:
    lowest = min(costs)
    ties = costs.count(lowest)
    at = costs.index(lowest)
    for _ in range(choice_index(seed, ties) if ties > 1 else 0):
        at = costs.index(lowest, at + 1)
    return at


def _sampled(costs: list[float], temperature: float, seed: int) -> int:
    lowest, span = min(costs), max(costs) - min(costs)
    if span == 0:
        return choice_index(seed, len(costs))
    total, weights = 0.0, list[float]()
    for cost in costs:
        weights.append(math.exp(-(cost - lowest) / span / temperature))
        total += weights[-1]  # `sum` adds up differently in other versions of Python
    point = unit_interval(seed) * total
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return len(costs) - 1
