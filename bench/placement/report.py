"""The results of the placement bench as tables."""

from collections.abc import Sequence

from bench.placement.grid import Place, PlacementResult
from bench.placement.regret import COMPARED, failed_checks, held_out, summed
from bench.tables import FigureTable

_TITLES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "requests_per_s": "requests/s",
    "goodput_rps": "goodput",
}


def tables(result: PlacementResult, held_out_seed: int | None) -> list[FigureTable]:
    """Return the mean regrets by figure, and by regime.

    With the seed of held-out places those by figure are of the others, and of those.
    """
    parts: dict[str, Sequence[Place]] = {"all": list(result)}
    if held_out_seed is not None:
        parts = dict(zip(("kept", "held out"), held_out([*result], held_out_seed), strict=True))
    return [*(_by_figure(name, result, places) for name, places in parts.items()), _by_regime(result)]


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
