"""The results of the placement bench as tables."""

from collections.abc import Sequence

from bench.placement.grid import Place, PlacementResult, PlacementRuns, medians
from bench.placement.regret import COMPARED, beside_the_best_of_others, clear_losses, failed_checks, held_out, summed
from bench.tables import FigureTable

_TITLES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "requests_per_s": "requests/s",
    "goodput_rps": "goodput",
}


_OURS = "kv"


def tables(runs: PlacementRuns, held_out_seed: int | None) -> list[FigureTable]:
    """Return the mean regrets by figure, and by regime; of several runs also what they say without the best's luck.

    With the seed of held-out places those by figure are of the others, and of those.
    """
    result = medians(runs)
    parts: dict[str, Sequence[Place]] = {"all": list(result)}
    if held_out_seed is not None:
        parts = dict(zip(("kept", "held out"), held_out([*result], held_out_seed), strict=True))
    found = [*(_by_figure(name, result, places) for name, places in parts.items()), _by_regime(result)]
    at = next(iter(runs.values()))
    if len(next(iter(at.values()))) > 1:
        found += [_beside_the_best_of_others(name, runs, places) for name, places in parts.items()]
        found += [_clear_losses(name, runs, places) for name, places in parts.items() if _OURS in at]
    return found


def _beside_the_best_of_others(name: str, runs: PlacementRuns, places: Sequence[Place]) -> FigureTable:
    of_policies = beside_the_best_of_others(runs, places)
    rows = [(policy, *(_percent(by_figure[each]) for each in COMPARED)) for policy, by_figure in of_policies.items()]
    title = f"mean regret beside the policy that is best in the other runs, {name}: {len(places)} places"
    return FigureTable(title, ("policy", *(_TITLES[figure] for figure in COMPARED)), rows)


def _clear_losses(name: str, runs: PlacementRuns, places: Sequence[Place]) -> FigureTable:
    found = clear_losses({place: runs[place] for place in places}, _OURS)
    rows = [(str(each.place), _TITLES[each.figure], each.winner, _percent(each.regret)) for each in found]
    title = f"figures in which another policy is more than 5 % better than {_OURS} in all runs, {name}"
    return FigureTable(title, ("place", "figure", "policy", "median"), rows)


def _by_figure(name: str, result: PlacementResult, places: Sequence[Place]) -> FigureTable:
    rows = [
        (
            each.policy,
            *(_percent(each.by_figure[figure]) for figure in COMPARED),
            _percent(each.mean),
            _percent(each.worst),
            f"{_TITLES[each.worst_figure]}: {each.worst_place}",
        )
        for each in summed(result, places)
    ]
    columns = ("policy", *(_TITLES[figure] for figure in COMPARED), "mean", "worst", "where")
    return FigureTable(f"mean regret, {name}: {len(places)} places", columns, rows)


def _by_regime(result: PlacementResult) -> FigureTable:
    regimes = list(dict.fromkeys(place.regime for place in result))
    of_regime = {
        regime: {each.policy: each.mean for each in summed(result, [at for at in result if at.regime == regime])}
        for regime in regimes
    }
    policies = [each.policy for each in summed(result, result)]
    rows = [(policy, *(_percent(of_regime[regime][policy]) for regime in regimes)) for policy in policies]
    return FigureTable("mean regret by regime", ("policy", *regimes), rows)


def remarks(result: PlacementResult) -> list[str]:
    """Return a line for each policy that fails checks of regimes."""
    failed = failed_checks(result).items()
    return [f"{name} fails {len(places)} checks: {'; '.join(places)}" for name, places in failed]


def _percent(share: float) -> str:
    return f"{share * 100:,.1f} %"
