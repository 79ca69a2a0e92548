"""Which runs a sweep has, which of them are still to be measured, and how long that takes. Pure.

runs       every combination of mode, layout, ISL, OSL, prefix share and load; at a URL there is no mode and no layout
a run      has a name, which is its file's, and inputs
measured   a run whose file exists and whose inputs are those that are wanted now; the others are to be measured
time left  the mean time of the runs that this process measured, for each run that is left
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

_IN_MINUTES_S = 90


class RunInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is chosen for a run. Equal inputs give equal prompts."""

    url: str = ""
    """The endpoint; empty: a fleet of simulated workers, started for this run."""
    model: str
    mode: str = ""
    layout: str = ""
    """Of simulated workers: `4a` or `1p3d`; of an endpoint the name of its fleet."""
    workers: int
    """Workers or GPUs that serve, by which throughput is divided."""
    concurrency: int = 0
    """Users with one request at a time each; 0: requests come at `rate`."""
    rate: float = 0.0
    """Requests a second, whatever the answers; their distances are exponential."""
    isl_tokens: int
    osl_tokens: int
    prefix_share: float
    """The share of a prompt that is one of `prefixes` texts; the rest is the request's own."""
    prefixes: int
    requests: int
    warmup: int
    """Requests of the same kind before these, which are not measured."""
    seed: int
    router_settings: tuple[str, ...] = ()
    worker_settings: tuple[str, ...] = ()

    @property
    def load(self) -> str:
        """The load in words: `c8` for 8 users, `r2.5` for 2.5 requests a second."""
        return f"c{self.concurrency}" if self.concurrency else f"r{self.rate:g}"

    @property
    def fleet(self) -> str:
        """What served, in words."""
        return self.layout if self.url else f"{self.mode}-{self.layout}"

    @property
    def workload(self) -> str:
        """Lengths and shares in words; runs of one workload are comparable."""
        return f"isl{self.isl_tokens}-osl{self.osl_tokens}-share{self.prefix_share:g}"

    @property
    def name(self) -> str:
        """The name of the run, and of its file; no two runs of a sweep share it."""
        return f"{self.fleet}-{self.workload}-{self.load}"


class SweepAxes(NamedTuple):
    """What is varied. One of `concurrencies` and `rates` is empty; `fleets` are modes with layouts."""

    fleets: Sequence[tuple[str, str, int]]
    """Mode, layout, and workers of the layout."""
    concurrencies: Sequence[int]
    rates: Sequence[float]
    isls: Sequence[int]
    osls: Sequence[int]
    prefix_shares: Sequence[float]


def runs_of(axes: SweepAxes, same: RunInputs) -> tuple[RunInputs, ...]:
    """Return all runs; `same` has the inputs that do not vary. Loads vary fastest."""
    loads = [(number, 0.0) for number in axes.concurrencies] or [(0, rate) for rate in axes.rates]
    return tuple(
        msgspec.structs.replace(
            same,
            mode=mode,
            layout=layout,
            workers=workers,
            concurrency=concurrency,
            rate=rate,
            isl_tokens=isl_tokens,
            osl_tokens=osl_tokens,
            prefix_share=share,
        )
        for (mode, layout, workers), isl_tokens, osl_tokens, share, (concurrency, rate) in product(
            axes.fleets, axes.isls, axes.osls, axes.prefix_shares, loads
        )
    )


def left(runs: Sequence[RunInputs], measured: Mapping[str, RunInputs]) -> list[RunInputs]:
    """Return the runs that are still to be measured; `measured` has the inputs of those that were, by their names."""
    return [each for each in runs if measured.get(each.name) != each]


def difference(wanted: RunInputs, found: RunInputs) -> str:
    """Return which inputs differ, with what was found and what is wanted."""
    return ", ".join(
        f"{field} (found {getattr(found, field)!r}, wanted {getattr(wanted, field)!r})"
        for field in RunInputs.__struct_fields__
        if getattr(found, field) != getattr(wanted, field)
    )


def time_left(took_s: Mapping[RunInputs, float], runs: Sequence[RunInputs]) -> str:
    """Return in words how long these runs will take, by those that were measured."""
    if not runs or not took_s:
        return f"{len(runs)} left"
    seconds = sum(_expected_s(took_s, each.load) for each in runs)
    about = f"{seconds / 60:.0f} min" if seconds >= _IN_MINUTES_S else f"{seconds:.0f} s"
    return f"{len(runs)} left, about {about}"


def _expected_s(took_s: Mapping[RunInputs, float], load: str) -> float:
    alike = [seconds for inputs, seconds in took_s.items() if inputs.load == load] or list(took_s.values())
    return sum(alike) / len(alike)
