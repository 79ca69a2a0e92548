"""Choosing among costs, reproducibly: the seed decides what the costs leave open.

Temperature 0: the lowest cost wins, the seed breaks exact ties. Temperature T > 0: costs are scaled to [0, 1] between
the lowest and the highest, and candidate i is drawn with probability proportional to exp(-cost_i / T).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kv_protocol.splitmix import choice_index, unit_interval


class Choice(NamedTuple):
    """Indices of the winner and of the cheapest other candidate, and how much more that one costs."""

    winner: int
    runner_up: int | None
    margin: float | None


def choose(costs: Sequence[float], temperature: float, seed: int) -> Choice:
    """Return the choice among one or more costs."""
    winner = _lowest(costs, seed) if temperature <= 0 else _sampled(costs, temperature, seed)
    others = [index for index in range(len(costs)) if index != winner]
    if not others:
        return Choice(winner, None, None)
    runner_up = min(others, key=costs.__getitem__)
    return Choice(winner, runner_up, costs[runner_up] - costs[winner])


def _lowest(costs: Sequence[float], seed: int) -> int:
    lowest = min(costs)
    ties = [index for index, cost in enumerate(costs) if cost == lowest]
    return ties[choice_index(seed, len(ties))]


def _sampled(costs: Sequence[float], temperature: float, seed: int) -> int:
    lowest, span = min(costs), max(costs) - min(costs)
    if span == 0:
        return choice_index(seed, len(costs))
    weights = [math.exp(-(cost - lowest) / span / temperature) for cost in costs]
    point = unit_interval(seed) * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return len(costs) - 1
