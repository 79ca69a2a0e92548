"""`router bench placement`: our modes and other routers' rules in many regimes, in virtual time.

A place is a regime, a load and a cache size; a cell, a policy's run there. Regret: how far it is from the place's best.

    latency       value / best - 1
    rate          best / value - 1
    at most       `REGRET_MAX`, also where the divisor is 0

TTFT p50 and p99, requests a second and goodput weigh the same. The best of ten policies is in part the luckiest one. So
with several runs each run of a policy is also compared with the policy that is best in the other runs, and the places
at which a policy loses in every run are listed.
"""

import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import click

from bench.placement.policies import PLACEMENTS
from bench.placement.regimes import CACHES, LOADS, REGIMES, Sizing
from bench.report import percentile
from bench.routing.trace import TraceInvalid
from bench.routing.virtual_fleet import VirtualFleet
from bench.side_by_side import play_side_by_side
from bench.tables import FigureTable, names_of, progress, report, report_options

FAST_SCALE = 0.08


@click.command("placement", context_settings={"show_default": True})
@click.option("--regimes", callback=names_of(REGIMES), help="between commas; absent: all")
@click.option("--policies", callback=names_of(PLACEMENTS), help="between commas; absent: all")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="the Mooncake conversation trace; without it the regime mooncake is left out",
)
@click.option("--held-out", type=int, metavar="SEED", help="report a third of the places apart, drawn by this seed")
@click.option("--fast", is_flag=True, help="few requests: for a first look, and for tests")
@click.option("--seed", type=int, default=1, help="seed of the workloads and the draws")
@click.option("--runs", type=click.IntRange(min=1), default=1, help="runs of each policy at each place; medians count")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="cells played side by side")
@report_options
def placement(
    *,
    regimes: tuple[str, ...],
    policies: tuple[str, ...],
    trace: Path | None,
    held_out: int | None,
    seed: int,
    runs: int,
    jobs: int,
    json_file: Path | None,
    markdown: Path | None,
    fast: bool,
) -> None:
    """Compare placements: simulated H200 engines and the real router core, in virtual time.

    Each regime is played at three loads with two cache sizes, under our modes and under the rules of other routers,
    which were written for this bench from their documentation. Printed is the regret: how far each policy
    is from the best of all in the same place, in TTFT, requests a second and goodput (first token within 1 s, then at
    most 20 ms between tokens on average).
    """
    grid = PlacementGrid(regimes, policies, scale=FAST_SCALE if fast else 1.0, seed=seed, runs=runs, trace=trace)
    left_out = [name for name in regimes if name not in grid.played_regimes]
    if not grid.played_regimes:
        raise click.UsageError(f"{', '.join(left_out)}: needs --trace")
    click.echo(f"{len(grid.cells())} runs in virtual time", err=True)
    try:
        with progress(len(grid.cells())) as on_progress:
            played = run_grid(grid, jobs=jobs, on_cell=lambda: on_progress("runs"))
    except TraceInvalid as error:
        raise click.UsageError(str(error)) from error
    result = medians(played)
    cells = [
        place._asdict()
        | {"policy": name, "runs": [each._asdict() for each in played[place][name]], "regret": regrets(at)[name]}
        | figures._asdict()
        for of_queue in map(medians, by_queue(played).values())
        for place, at in of_queue.items()
        for name, figures in at.items()
    ]
    facts = [f"{len(grid.cells())} runs in virtual time, from seed {seed} on"]
    facts += [f"{name} fails {len(at)} checks: {'; '.join(at)}" for name, at in failed_checks(result).items()]
    facts += [f"left out without --trace: {name}" for name in left_out]
    report(facts, tables(played, held_out), {"cells": cells}, json_file, markdown)


SLO_TTFT_S, SLO_ITL_S = 1.0, 0.020
"""Limits of a request that counts as goodput: seconds to its first token, and between tokens on average."""


class PlacementGrid(NamedTuple):
    """What is compared; regimes that need the trace are left out without one."""

    regimes: tuple[str, ...] = tuple(REGIMES)
    policies: tuple[str, ...] = tuple(PLACEMENTS)
    loads: tuple[float, ...] = LOADS
    caches: tuple[str, ...] = CACHES
    scale: float = 1.0
    seed: int = 1
    runs: int = 1
    """Runs of each policy at each place, with workloads of `seed`, `seed` + 1, and so on."""
    trace: Path | None = None

    @property
    def played_regimes(self) -> tuple[str, ...]:
        """The regimes that can be played."""
        return tuple(name for name in self.regimes if self.trace is not None or not REGIMES[name].needs_trace)

    def places(self) -> Iterator["Place"]:
        """Yield the places at which policies are compared."""
        for regime, load, cache in product(self.played_regimes, self.loads, self.caches):
            yield Place(regime, load, cache)

    def cells(self) -> list["Cell"]:
        """Return all runs, in order."""
        seeds = range(self.seed, self.seed + self.runs)
        return [Cell(*each) for each in product(self.places(), self.policies, seeds)]


class Place(NamedTuple):
    """One comparison of all policies."""

    regime: str
    load: float
    cache: str

    def __str__(self) -> str:
        return f"{self.regime}, load {self.load:g}, {self.cache}"


class Cell(NamedTuple):
    """One run."""

    place: Place
    policy: str
    seed: int


class PlacementFigures(NamedTuple):
    """One policy at one place. `checked` is the share that the regime checks; None: it checks none."""

    requests: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    goodput_rps: float
    checked: float | None

    @classmethod
    def of_runs(cls, runs: Sequence["PlacementFigures"]) -> "PlacementFigures":
        """Return the medians of the runs, and the checked share that is nearest to failing."""
        shares = [run.checked for run in runs if run.checked is not None]
        worst = max(shares, key=lambda share: abs(share - 0.5), default=None)
        medians = {
            name: statistics.median(getattr(run, name) for run in runs) for name in cls._fields if name != "checked"
        }
        return cls(**{**medians, "requests": int(medians["requests"])}, checked=worst)


PlacementRuns = dict[Place, dict[str, list[PlacementFigures]]]
"""The figures of each run, by place and policy, in the order of the grid; runs in the order of their seeds."""
PlacementResult = dict[Place, dict[str, PlacementFigures]]
"""The medians of the runs, in the same order."""


def medians(runs: PlacementRuns) -> PlacementResult:
    """Return the medians of each policy's runs."""
    return {place: {name: PlacementFigures.of_runs(each) for name, each in at.items()} for place, at in runs.items()}


def play(grid: PlacementGrid, cell: Cell) -> PlacementFigures:
    """Play one policy at one place, once."""
    place, policy, seed = cell
    regime, placement = REGIMES[place.regime], PLACEMENTS[policy]
    workload = regime.make(Sizing(seed, place.load, grid.scale, grid.trace))
    outcomes = VirtualFleet(
        regime.fleet(place.cache, workload),
        placement.policy,
        workload.requests,
        seed=seed,
        follow_ups=workload.follow_ups,
        modes_of=placement.modes_of,
        queue=placement.queue,
    ).run()
    ttfts_s = [each.ttft_s for each in outcomes]
    span_s = max(each.arrival_s + each.e2e_s for each in outcomes) - min(each.arrival_s for each in outcomes)
    return PlacementFigures(
        requests=len(outcomes),
        hit_rate=sum(each.cached_tokens for each in outcomes) / sum(each.isl_tokens for each in outcomes),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        requests_per_s=len(outcomes) / span_s,
        goodput_rps=sum(each.ttft_s <= SLO_TTFT_S and each.itl_s <= SLO_ITL_S for each in outcomes) / span_s,
        checked=None if regime.check is None else regime.check(outcomes, workload),
    )


def run_grid(grid: PlacementGrid, *, jobs: int, on_cell: Callable[[], None] = lambda: None) -> PlacementRuns:
    """Play every cell, `jobs` at a time in processes of their own (1: here); call `on_cell` after each."""
    found: dict[Cell, PlacementFigures] = {}
    for cell, cell_figures in play_side_by_side(partial(play, grid), grid.cells(), jobs):
        found[cell] = cell_figures
        on_cell()
    runs: PlacementRuns = {}
    for cell in grid.cells():
        runs.setdefault(cell.place, {}).setdefault(cell.policy, []).append(found[cell])
    return runs


REGRET_MAX = 10.0
LATENCIES = ("ttft_p50_s", "ttft_p99_s")
RATES = ("requests_per_s", "goodput_rps")
COMPARED = LATENCIES + RATES
_HELD_OUT_SHARE = 1 / 3
CLEAR_LOSS = 0.05
"""Another policy clearly wins if it is better by more than this."""


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
    """Return the regret of each policy over one or more places; the least mean comes first."""
    at_places = [(place, regrets(result[place])) for place in places]
    found = list[PolicyRegret]()
    for name in at_places[0][1]:
        by_figure = {figure: sum(at[name][figure] for _, at in at_places) / len(at_places) for figure in COMPARED}
        worst, figure, where = max(
            ((at[name][figure], figure, str(place)) for place, at in at_places for figure in COMPARED),
            key=lambda each: each[0],
        )
        found.append(PolicyRegret(name, by_figure, sum(by_figure.values()) / len(by_figure), worst, figure, where))
    return sorted(found, key=lambda each: each.mean)


class ClearLoss(NamedTuple):
    """A figure in which another policy is better than this one by more than `CLEAR_LOSS` in all runs of a place."""

    place: Place
    figure: str
    winner: str
    regret: float
    """The median of the runs."""


def clear_losses(runs: PlacementRuns, policy: str) -> list[ClearLoss]:
    """Return where the policy clearly loses, with the policy that wins most there."""
    found = []
    for place, at in runs.items():
        for figure in COMPARED:
            losses = [
                ClearLoss(place, figure, name, statistics.median(lost))
                for name, of_name in at.items()
                if min(lost := _lost(at[policy], of_name, figure)) > CLEAR_LOSS
            ]
            found += [max(losses, key=lambda each: each.regret)] if losses else []
    return found


def _lost(runs: Sequence[PlacementFigures], others: Sequence[PlacementFigures], figure: str) -> list[float]:
    pairs = zip(runs, others, strict=True)
    return [_regret(float(getattr(one, figure)), float(getattr(other, figure)), figure) for one, other in pairs]


def beside_the_best_of_others(runs: PlacementRuns, places: Iterable[Place]) -> dict[str, dict[str, float]]:
    """Return each policy's mean regret, by figure, against the policy that is best in the place's other runs.

    It needs two runs at least. The regret is below 0 for a policy that is better than the best of the other runs.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for place in places:
        at = runs[place]
        for figure in COMPARED:
            for run in range(len(next(iter(at.values())))):
                best = _best_without(at, run, figure)
                for name, of_name in at.items():
                    lost = _lost([of_name[run]], [at[best][run]], figure)
                    found.setdefault(name, {}).setdefault(figure, []).extend(lost)
    return {
        name: {figure: statistics.mean(each) for figure, each in of_name.items()} for name, of_name in found.items()
    }


def _best_without(at: Mapping[str, Sequence[PlacementFigures]], run: int, figure: str) -> str:
    others = {name: [each for number, each in enumerate(of_name) if number != run] for name, of_name in at.items()}
    means = {name: statistics.mean(float(getattr(each, figure)) for each in runs) for name, runs in others.items()}
    return (min if figure in LATENCIES else max)(means, key=means.__getitem__)


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


_TITLES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "requests_per_s": "requests/s",
    "goodput_rps": "goodput",
}


def tables(runs: PlacementRuns, held_out_seed: int | None) -> list[FigureTable]:
    """Return the mean regrets by figure, and by regime; of several runs also `beside_the_best_of_others`.

    With a seed, regrets by figure are given for the held-out places and for the others. Policies with a queue are
    compared only with each other: one that lets short requests go first is better by another measure.
    """
    parts: dict[str, Sequence[Place]] = {"all": list(runs)}
    if held_out_seed is not None:
        parts = dict(zip(("kept", "held out"), held_out([*runs], held_out_seed), strict=True))
    return [table for queue, of_queue in by_queue(runs).items() for table in _of_queue(queue, of_queue, parts)]


def by_queue(runs: PlacementRuns) -> dict[str, PlacementRuns]:
    """Return the runs by the queue of their policies."""
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
    figures = tuple(_TITLES[figure] for figure in COMPARED)
    for name, places in parts.items():
        yield _by_figure(f"{queue}, {name}", result, places)
    yield _by_regime(queue, result)
    for name, places in parts.items() if len(next(iter(at.values()))) > 1 else ():
        beside = beside_the_best_of_others(runs, places)
        rows = [(policy, *(_percent(by_figure[each]) for each in COMPARED)) for policy, by_figure in beside.items()]
        title = f"mean regret beside the policy that is best in the other runs, {queue}, {name}: {len(places)} places"
        yield FigureTable(title, ("policy", *figures), rows)
        if ours is not None:
            lost = clear_losses({place: runs[place] for place in places}, ours)
            losses = [(str(each.place), _TITLES[each.figure], each.winner, _percent(each.regret)) for each in lost]
            title = (
                f"figures in which another policy is more than {CLEAR_LOSS:.0%} better than {ours} in all runs, {name}"
            )
            yield FigureTable(title, ("place", "figure", "policy", "median"), losses)


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


def _percent(share: float) -> str:
    return f"{share * 100:,.1f} %"
