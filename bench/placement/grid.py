"""The cells of the bench: every regime at every load with every cache size, under every policy; and playing them."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.placement.policies import PLACEMENTS
from bench.placement.regimes import CACHES, LOADS, REGIMES, Sizing
from bench.report import percentile
from bench.routing.virtual_fleet import VirtualFleet
from bench.side_by_side import play_side_by_side

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
    """Of each policy at each place: with workloads of `seed`, `seed` + 1, and so on."""
    trace: Path | None = None

    @property
    def played_regimes(self) -> tuple[str, ...]:
        """The regimes that can be played."""
        return tuple(name for name in self.regimes if self.trace is not None or not REGIMES[name].needs_trace)

    @property
    def seeds(self) -> range:
        """The seed of each run's workload."""
        return range(self.seed, self.seed + self.runs)

    def places(self) -> Iterator["Place"]:
        """Yield where policies are compared."""
        for regime, load, cache in product(self.played_regimes, self.loads, self.caches):
            yield Place(regime, load, cache)

    def cells(self) -> list["Cell"]:
        """Return what is played."""
        return [Cell(*each) for each in product(self.places(), self.policies, self.seeds)]


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
    """One policy at one place. `checked` is the share that the regime checks, if it has one."""

    requests: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    goodput_rps: float
    checked: float | None

    @classmethod
    def of_runs(cls, runs: Sequence["PlacementFigures"]) -> "PlacementFigures":
        """Return the medians of the runs; of the checked shares the one nearest to failing."""
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
    """Play every cell, `jobs` at a time in processes of their own (1: here); `on_cell` after each."""
    found: dict[Cell, PlacementFigures] = {}
    for cell, cell_figures in play_side_by_side(partial(play, grid), grid.cells(), jobs):
        found[cell] = cell_figures
        on_cell()
    return {
        place: {name: [found[Cell(place, name, seed)] for seed in grid.seeds] for name in grid.policies}
        for place in grid.places()
    }
