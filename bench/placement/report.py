"""The results of the placement bench as JSON and as Markdown."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from bench.placement.grid import SLO_ITL_S, SLO_TTFT_S, Place, PlacementGrid, PlacementResult, PlacementRuns, medians
from bench.placement.regret import (
    COMPARED,
    SURPASSED_BY,
    PolicyRegret,
    RivalRegret,
    against_rivals,
    failed_checks,
    held_out,
    regrets,
    summed,
    surpassed,
)
from bench.report import machine_line

_TITLES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "requests_per_s": "requests/s",
    "goodput_rps": "goodput",
}


class Summary(NamedTuple):
    """Regrets over some of the places."""

    title: str
    places: Sequence[Place]
    policies: Sequence[PolicyRegret]


def summaries(result: PlacementResult, seed: int | None) -> list[Summary]:
    """Return one summary of all places; with the seed of held-out ones one of the others, then one of those."""
    places = list(result)
    if seed is None:
        return [Summary("all", places, summed(result, places))]
    kept, drawn = held_out(places, seed)
    return [Summary("kept", kept, summed(result, kept)), Summary("held out", drawn, summed(result, drawn))]


def as_json(grid: PlacementGrid, runs: PlacementRuns, held_out_seed: int | None) -> bytes:
    """Return everything measured, on this machine; equal arguments give equal bytes."""
    result = medians(runs)
    return msgspec.json.encode(
        {
            "machine": machine_line(),
            "shape": grid._replace(trace=None)._asdict() | {"slo": {"ttft_s": SLO_TTFT_S, "itl_s": SLO_ITL_S}},
            "cells": [
                place._asdict()
                | {"policy": name}
                | figures._asdict()
                | {"regret": regrets(at)[name], "runs": [run._asdict() for run in runs[place][name]]}
                for place, at in result.items()
                for name, figures in at.items()
            ],
            "summaries": [
                {
                    "title": each.title,
                    "places": [str(place) for place in each.places],
                    "policies": [policy._asdict() for policy in each.policies],
                }
                for each in summaries(result, held_out_seed)
            ],
            "surpassed": {
                name: {figure: [str(place) for place in places] for figure, places in of_figure.items()}
                for name, of_figure in surpassed(runs).items()
            },
            "against_rivals": [each._asdict() for each in against_rivals(runs)],
            "failed_checks": failed_checks(result),
        }
    )


def markdown(runs: PlacementRuns, held_out_seed: int | None) -> Iterator[str]:
    """Yield the lines of the tables: regrets by figure, regime and rivals, places surpassed, and the failed checks."""
    result = medians(runs)
    for summary in summaries(result, held_out_seed):
        yield f"Mean regret, {summary.title}: {len(summary.places)} places, {len(summary.policies)} policies"
        yield ""
        yield from _by_figure(summary.policies)
        yield ""
    yield "Mean regret by regime"
    yield ""
    yield from _by_regime(result)
    yield ""
    rivals = against_rivals(runs)
    if rivals:
        yield "Mean regret against the policy that is best in the other runs of a place"
        yield ""
        yield from _by_rival(rivals)
        yield ""
    yield f"Places where one other policy is more than {SURPASSED_BY:.0%} better in every run"
    yield ""
    yield from _surpassed(runs)
    yield ""
    for name, places in failed_checks(result).items():
        yield f"* {name} fails {len(places)} checks: {'; '.join(places)}"


def _by_figure(policies: Sequence[PolicyRegret]) -> Iterator[str]:
    yield _row(["policy", *(_TITLES[figure] for figure in COMPARED), "mean", "worst", "where"])
    yield _row(["---", *["---:"] * (len(COMPARED) + 2), "---"])
    for each in policies:
        shares = [_percent(each.by_figure[figure]) for figure in COMPARED]
        where = f"{_TITLES[each.worst_figure]}: {each.worst_place}"
        yield _row([each.policy, *shares, _percent(each.mean), _percent(each.worst), where])


def _by_regime(result: PlacementResult) -> Iterator[str]:
    regimes = list(dict.fromkeys(place.regime for place in result))
    of_regime = {
        regime: {
            each.policy: each.mean for each in summed(result, [place for place in result if place.regime == regime])
        }
        for regime in regimes
    }
    yield _row(["policy", *regimes])
    yield _row(["---", *["---:"] * len(regimes)])
    for each in summed(result, result):
        yield _row([each.policy, *(_percent(of_regime[regime][each.policy]) for regime in regimes)])


def _by_rival(rivals: Sequence[RivalRegret]) -> Iterator[str]:
    yield _row(["policy", *(_TITLES[figure] for figure in COMPARED), "worst", "where"])
    yield _row(["---", *["---:"] * (len(COMPARED) + 1), "---"])
    for each in rivals:
        shares = [_percent(each.by_figure[figure]) for figure in COMPARED]
        where = f"{_TITLES[each.worst_figure]}: {each.worst_place}"
        yield _row([each.policy, *shares, _percent(each.worst), where])


def _surpassed(runs: PlacementRuns) -> Iterator[str]:
    yield _row(["policy", *(_TITLES[figure] for figure in COMPARED)])
    yield _row(["---", *["---:"] * len(COMPARED)])
    counts = {name: [len(of_figure[each]) for each in COMPARED] for name, of_figure in surpassed(runs).items()}
    for name, numbers in sorted(counts.items(), key=lambda each: sum(each[1])):
        yield _row([name, *map(str, numbers)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{share * 100:,.1f} %"
