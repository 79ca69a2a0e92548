"""Regret: how far a policy is from the best of all policies in the same place.

    latency       value / best - 1
    rate          best / value - 1
    at most       `REGRET_MAX`, also where a value is 0 and the best is not

TTFT p50 and p99, requests a second and goodput count alike.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.placement.grid import Place, PlacementFigures, PlacementResult

REGRET_MAX = 10.0
LATENCIES = ("ttft_p50_s", "ttft_p99_s")
RATES = ("requests_per_s", "goodput_rps")
COMPARED = LATENCIES + RATES
_HELD_OUT_SHARE = 1 / 3


class PolicyRegret(NamedTuple):
    """The regret of one policy over some places: its mean by figure, the mean of these, and its worst."""

    policy: str
    by_figure: dict[str, float]
    mean: float
    worst: float
    worst_figure: str
    worst_place: str


def regrets(at: Mapping[str, PlacementFigures]) -> dict[str, dict[str, float]]:
    """Return the regret of each policy at one place, by figure."""
    found: dict[str, dict[str, float]] = {name: {} for name in at}
    for figure in COMPARED:
        values = {name: float(getattr(figures, figure)) for name, figures in at.items()}
        best = min(values.values()) if figure in LATENCIES else max(values.values())
        for name, value in values.items():
            found[name][figure] = _regret(value, best, figure)
    return found


def _regret(value: float, best: float, figure: str) -> float:
    if value == best:
        return 0.0
    numerator, denominator = (value, best) if figure in LATENCIES else (best, value)
    return min(REGRET_MAX, numerator / denominator - 1) if denominator else REGRET_MAX


def summed(result: PlacementResult, places: Iterable[Place]) -> list[PolicyRegret]:
    """Return the regret of each policy over the places, which are some, the least mean first."""
    at_places = [(place, regrets(result[place])) for place in places]
    policies = list(at_places[0][1])
    return sorted((_of_policy(name, at_places) for name in policies), key=lambda each: each.mean)


def _of_policy(name: str, at_places: Sequence[tuple[Place, dict[str, dict[str, float]]]]) -> PolicyRegret:
    by_figure = {figure: sum(at[name][figure] for _, at in at_places) / len(at_places) for figure in COMPARED}
    worst, figure, place = max(
        ((at[name][figure], figure, str(place)) for place, at in at_places for figure in COMPARED),
        key=lambda found: found[0],
    )
    return PolicyRegret(name, by_figure, sum(by_figure.values()) / len(by_figure), worst, figure, place)


def held_out(places: Sequence[Place], seed: int) -> tuple[list[Place], list[Place]]:
    """Return the places without a third of them, drawn by the seed, and that third; each in order."""
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    drawn = set(draw.sample(places, max(1, round(len(places) * _HELD_OUT_SHARE))))
    return [place for place in places if place not in drawn], [place for place in places if place in drawn]


def failed_checks(result: PlacementResult) -> dict[str, list[str]]:
    """Return for each policy the checks that it fails: the place, and the share found."""
    failed: dict[str, list[str]] = {}
    for place, at in result.items():
        for name, figures in at.items():
            share = figures.checked
            if share is not None and not 0.0 < share < 1.0:
                failed.setdefault(name, []).append(f"{place}: {share:.2f}")
    return failed
