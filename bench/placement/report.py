"""The results of the placement bench as tables."""

from collections.abc import Iterator, Mapping, Sequence

from bench.placement.grid import Place, PlacementResult, PlacementRuns, medians
from bench.placement.policies import PLACEMENTS
from bench.placement.regret import (
    CLEAR_LOSS,
    COMPARED,
    beside_the_best_of_others,
    clear_losses,
    failed_checks,
    held_out,
    summed,
)
from bench.tables import FigureTable

_TITLES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "requests_per_s": "requests/s",
    "goodput_rps": "goodput",
}


def tables(runs: PlacementRuns, held_out_seed: int | None) -> list[FigureTable]:
    """Return the mean regrets by figure, and by regime; of several runs also what they say without the best's luck.

    With the seed of held-out places those by figure are of the others, and of those. Policies behind a queue are
    compared with each other alone: one that lets short requests go first is better by another measure.
    """
    parts: dict[str, Sequence[Place]] = {"all": list(runs)}
    if held_out_seed is not None:
        parts = dict(zip(("kept", "held out"), held_out([*runs], held_out_seed), strict=True))
    return [table for queue, of_queue in by_queue(runs).items() for table in _of_queue(queue, of_queue, parts)]


def by_queue(runs: PlacementRuns) -> dict[str, PlacementRuns]:
    """Return the runs of the policies that have the same queue."""
    names: dict[str, list[str]] = {}
    for name in next(iter(runs.values())):
        names.setdefault(PLACEMENTS[name].queue.title, []).append(name)
    return {
        queue: {place: {name: at[name] for name in of_queue} for place, at in runs.items()}
        for queue, of_queue in names.items()
    }


def _of_queue(queue: str, runs: PlacementRuns, parts: Mapping[str, Sequence[Place]]) -> Iterator[FigureTable]:
    result, at = medians(runs), next(iter(runs.values()))
    ours = next((name for name in at if PLACEMENTS[name].policy == PLACEMENTS["kv"].policy), None)
    for name, places in parts.items():
        yield _by_figure(f"{queue}, {name}", result, places)
    yield _by_regime(queue, result)
    if len(next(iter(at.values()))) > 1:
        for name, places in parts.items():
            yield _beside_the_best_of_others(f"{queue}, {name}", runs, places)
            if ours is not None:
                yield _clear_losses(ours, name, runs, places)


def _beside_the_best_of_others(name: str, runs: PlacementRuns, places: Sequence[Place]) -> FigureTable:
    of_policies = beside_the_best_of_others(runs, places)
    rows = [(policy, *(_percent(by_figure[each]) for each in COMPARED)) for policy, by_figure in of_policies.items()]
    title = f"mean regret beside the policy that is best in the other runs, {name}: {len(places)} places"
    return FigureTable(title, ("policy", *(_TITLES[figure] for figure in COMPARED)), rows)


def _clear_losses(ours: str, name: str, runs: PlacementRuns, places: Sequence[Place]) -> FigureTable:
    found = clear_losses({place: runs[place] for place in places}, ours)
    rows = [(str(each.place), _TITLES[each.figure], each.winner, _percent(each.regret)) for each in found]
    title = f"figures in which another policy is more than {CLEAR_LOSS:.0%} better than {ours} in all runs, {name}"
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


def _by_regime(queue: str, result: PlacementResult) -> FigureTable:
    regimes = list(dict.fromkeys(place.regime for place in result))
    of_regime = {
        regime: {each.policy: each.mean for each in summed(result, [at for at in result if at.regime == regime])}
        for regime in regimes
    }
    policies = [each.policy for each in summed(result, result)]
    rows = [(policy, *(_percent(of_regime[regime][policy]) for regime in regimes)) for policy in policies]
    return FigureTable(f"mean regret by regime, {queue}", ("policy", *regimes), rows)


def remarks(result: PlacementResult) -> list[str]:
    """Return a line for each policy that fails checks of regimes."""
    failed = failed_checks(result).items()
    return [f"{name} fails {len(places)} checks: {'; '.join(places)}" for name, places in failed]


def _percent(share: float) -> str:
    return f"{share * 100:,.1f} %"
