"""The closed loop as text, as JSON and as a plot: figures of played policies, their intervals and differences.

hit rate      cached prompt tokens / prompt tokens
imbalance     most uncached tokens of a rank over the mean of all ranks, in windows of 10 s; the mean of the windows
requests/s    from the first arrival to the last end

Intervals are a bootstrap's, from the 2.5th to the 97.5th percentile: the requests are split in the order of arrival
into `BLOCKS` equal blocks, which are drawn with replacement, `DRAWS` times with `SEED`. All policies have the same
draws, so an interval of a difference compares the same requests. It says how much the requests differ, not how well
the simulation fits: the row `recorded` and the row of the policy in force show that.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.plot import PlotLabels, Point, frontier, plotted
from bench.report import imbalances
from bench.what_if.play import WARM, Cell, Fit, Floats, Played, Stage
from bench.what_if.recorded import Recorded, RecordedFigures
from kv_protocol.splitmix import choice_index, splitmix64

BLOCKS, DRAWS, SEED = 40, 400, 1
RATE_WINDOWS_MAX = 1000
_INTERVAL = (2.5, 97.5)


class Estimate(NamedTuple):
    """A figure, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


Figures = dict[str, Estimate]
"""Figures of a policy, or their differences from those of the policy in force, by name. Times are in seconds."""
Statistic = Callable[[Played, NDArray[np.intp]], float]
"""A figure of the requests at these places, which ascend block by block."""


def _itl_mean(run: Played, at: NDArray[np.intp]) -> float:
    known = run.itl_s[at]
    known = known[known > 0]
    return float(known.mean()) if len(known) else 0.0


_STATISTICS: dict[str, Statistic] = {
    "hit_rate": lambda run, at: float(run.cached_tokens[at].sum() / run.isl_tokens[at].sum()),
    "ttft_mean_s": lambda run, at: float(run.ttft_s[at].mean()),
    "ttft_p50_s": lambda run, at: float(np.quantile(run.ttft_s[at], 0.5)),
    "ttft_p99_s": lambda run, at: float(np.quantile(run.ttft_s[at], 0.99)),
    "itl_mean_s": _itl_mean,
}


def figures(run: Played, ranks: int) -> Figures:
    """Return the figures of a run on `ranks` ranks."""
    estimates = {name: _estimate(partial(of, run), len(run.ttft_s)) for name, of in _STATISTICS.items()}
    return {**estimates, "imbalance": _imbalance(run, ranks), "requests_per_s": _rate(run)}


def gains(run: Played, before: Played) -> Figures:
    """Return how a run differs from another one of the same requests."""

    def difference(statistic: Statistic, at: NDArray[np.intp]) -> float:
        return statistic(run, at) - statistic(before, at)

    return {name: _estimate(partial(difference, of), len(run.ttft_s)) for name, of in _STATISTICS.items()}


def _estimate(of: Callable[[NDArray[np.intp]], float], count: int) -> Estimate:
    return _interval(of(np.arange(count)), [of(at) for at in drawn(count)])


def _imbalance(run: Played, ranks: int) -> Estimate:
    uncached = (run.isl_tokens - run.cached_tokens).astype(np.int64)
    requests = zip(run.arrival_s.tolist(), run.worker.tolist(), uncached.tolist(), strict=True)
    known = np.array(imbalances(requests, workers=ranks))
    return _interval(float(known.mean()), [float(known[at].mean()) for at in drawn(len(known))])


def _rate(run: Played) -> Estimate:
    """Return the requests a second, from the first arrival to the last end.

    The interval is drawn from equal windows of about a second, or longer so that there are at most `RATE_WINDOWS_MAX`.
    """
    began_s, span_s = float(run.arrival_s.min()), max(float(run.end_s.max() - run.arrival_s.min()), 1e-9)
    windows = min(max(1, int(np.ceil(span_s))), RATE_WINDOWS_MAX)
    window = ((run.end_s - began_s) * (windows / span_s)).astype(np.int64)
    ends = np.bincount(np.minimum(window, windows - 1), minlength=windows)
    rates = [float(ends[at].mean()) * windows / span_s for at in drawn(windows)]
    return _interval(len(run.end_s) / span_s, rates)


def _interval(value: float, means: Sequence[float]) -> Estimate:
    low, high = np.percentile(means, _INTERVAL).tolist()
    return Estimate(value, low, high)


@lru_cache(maxsize=4)
def drawn(count: int) -> list[NDArray[np.intp]]:
    """Return the places of the requests of each draw, out of `count`."""
    blocks = np.array_split(np.arange(count, dtype=np.int32), min(BLOCKS, count))
    numbers = range(len(blocks))
    return [
        np.concatenate([blocks[choice_index(splitmix64(SEED + draw), len(blocks), at)] for at in numbers])
        for draw in range(DRAWS)
    ]


def of_recorded(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return mean, p50 and p99 of measured times; None if there are none."""
    if not values:
        return None
    found: Floats = np.array(values)
    return float(found.mean()), float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99))


IN_FORCE = "in force"
FITS_WITHIN = 1.25
"""A report warns of a fit with factors further apart than this."""


class PlayedPolicy(NamedTuple):
    """A cell with its figures, and its gains over the policy in force at the same load; None: it is that policy."""

    cell: Cell
    figures: Figures
    gains: Figures | None


class Result(NamedTuple):
    """All that was played. `measured` is what the recorded fleet did with the counted requests."""

    played: list[PlayedPolicy]
    measured: RecordedFigures
    fit: Fit
    requests: int
    ranks: int
    left_out: dict[str, int]

    def at(self, load: float) -> list[PlayedPolicy]:
        """Return the policies at this load."""
        return [each for each in self.played if each.cell.load == load]

    @property
    def loads(self) -> list[float]:
        """The loads, in the order in which they were asked for."""
        return list(dict.fromkeys(each.cell.load for each in self.played))


def result_of(recorded: Recorded, stage: Stage, runs: dict[Cell, Played]) -> Result:
    """Return the figures of all runs."""
    base = {cell.load: run for cell, run in runs.items() if cell.name == IN_FORCE}
    ranks = len(stage.shape.engines)
    played = [
        PlayedPolicy(cell, figures(run, ranks), None if cell.name == IN_FORCE else gains(run, base[cell.load]))
        for cell, run in runs.items()
    ]
    count = len(stage.requests)
    return Result(played, recorded.measured(int(WARM * count)), stage.fit, count, ranks, dict(recorded.left_out))


def lines(result: Result) -> list[str]:
    """Return tables, their limits, and advice."""
    found = [
        f"{result.requests} recorded requests on {result.ranks} simulated ranks, the first {WARM:.0%} not counted",
        *_fit_lines(result),
    ]
    for load in result.loads:
        found += ["", f"load {load:g}" if len(result.loads) > 1 else "", *_table(result, load)]
    found += ["", "* on the Pareto front of mean TTFT and mean ITL at its load"]
    found.append("intervals: bootstrap of blocks of requests; requests come as recorded, however late an answer is")
    found += [f"note: left out: {number} {reason}" for reason, number in result.left_out.items()]
    found.append(advice(result))
    return [line for at, line in enumerate(found) if line or (at and found[at - 1])]


def _fit_lines(result: Result) -> list[str]:
    fit = result.fit
    if not fit.measurements:
        return ["engines: the calibration alone; the journal has no times of tokens to fit them to"]
    words = f"engines: fitted to {fit.measurements} recorded times, factors within {fit.left - 1:.0%}"
    return [words + (": a poor fit, take no absolute time from it" if fit.left > FITS_WITHIN else "")]


def _table(result: Result, load: float) -> list[str]:
    rows = [["", "policy", "hit rate", "TTFT mean", "TTFT p50", "TTFT p99", "ITL mean", "imbalance", "requests/s"]]
    if load == 1.0:
        rows.append(_measured_row(result.measured))
    policies = result.at(load)
    best = frontier(list(map(_point, policies)))
    rows += [_row(each, is_best=_point(each) in best) for each in policies]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _point(each: PlayedPolicy) -> Point:
    """Return how soon first tokens come, and how fast the others: more is better in both."""
    ttft_s, itl_s = each.figures["ttft_mean_s"].value, each.figures["itl_mean_s"].value
    return Point(1 / max(ttft_s, 1e-6), 1 / max(itl_s, 1e-6), f"x{each.cell.load:g}", is_served=True)


def _measured_row(measured: RecordedFigures) -> list[str]:
    times = of_recorded(measured.ttft_s)
    shown = ["-"] * 3 if times is None else [f"{1e3 * each:.1f} ms" for each in times]
    return ["", "recorded", "-" if measured.hit_rate is None else f"{measured.hit_rate:.1%}", *shown, "-", "-", "-"]


def _row(each: PlayedPolicy, *, is_best: bool) -> list[str]:
    found = each.figures
    return [
        "*" if is_best else "",
        each.cell.name,
        _shown(found["hit_rate"], 100, "%"),
        *(_shown(time, 1e3, " ms") for time in (found["ttft_mean_s"], found["ttft_p50_s"], found["ttft_p99_s"])),
        _shown(found["itl_mean_s"], 1e3, " ms", 2),
        _shown(found["imbalance"], 1, "", 2),
        _shown(found["requests_per_s"], 1, "", 2),
    ]


def _shown(found: Estimate, factor: float, unit: str, digits: int = 1) -> str:
    low, high = factor * found.low, factor * found.high
    return f"{factor * found.value:.{digits}f}{unit} ({low:.{digits}f}..{high:.{digits}f})"


def advice(result: Result) -> str:
    """Return what the figures at the first load suggest, and how sure that is."""
    best = best_of(result)
    base = next(each for each in result.at(result.loads[0]) if each.gains is None)
    error = _error_of(base, result.measured)
    if best is None or best.gains is None:
        return f"Advice: keep the policy in force: no other has a lower mean TTFT beyond its interval. {error}"
    gained = best.gains
    return (
        f"Advice: try {best.cell.name}: mean TTFT {_signed(gained['ttft_mean_s'], 1e3, ' ms')}, "
        f"p99 {_signed(gained['ttft_p99_s'], 1e3, ' ms')}, hit rate {_signed(gained['hit_rate'], 100, ' points')}, "
        f"mean ITL {_signed(gained['itl_mean_s'], 1e3, ' ms', 2)} (95 % intervals). {error}"
    )


def best_of(result: Result) -> PlayedPolicy | None:
    """Return the policy with the lowest mean TTFT at the first load, of those with a gain beyond its interval.

    A policy is left out if its p99 is worse by more than its interval. None: no policy is left.
    """
    better = [
        each
        for each in result.at(result.loads[0])
        if each.gains is not None and each.gains["ttft_mean_s"].high < 0 and each.gains["ttft_p99_s"].low <= 0
    ]
    return min(better, key=lambda each: each.figures["ttft_mean_s"].value, default=None)


def _error_of(base: PlayedPolicy, measured: RecordedFigures) -> str:
    times = of_recorded(measured.ttft_s)
    unknown = "How near the simulation is to the fleet is not known"
    if times is None:
        return f"{unknown}: no times were recorded."
    if base.cell.load != 1.0:
        return f"{unknown}: the recorded load, 1, was not played."
    apart = base.figures["ttft_mean_s"].value / times[0] - 1
    return f"Under the policy in force the simulation is {apart:+.0%} from the recorded mean TTFT."


def _signed(found: Estimate, factor: float, unit: str, digits: int = 1) -> str:
    low, high = factor * found.low, factor * found.high
    return f"{factor * found.value:+.{digits}f}{unit} ({low:+.{digits}f} to {high:+.{digits}f})"


def as_object(result: Result) -> dict[str, Any]:
    """Return everything, for JSON."""
    times = of_recorded(result.measured.ttft_s)
    return {
        "requests": result.requests,
        "ranks": result.ranks,
        "left_out": result.left_out,
        "fit": {"measurements": result.fit.measurements, "left": result.fit.left},
        "recorded": {"hit_rate": result.measured.hit_rate, "ttft_mean_p50_p99_s": times},
        "policies": [
            {
                "name": each.cell.name,
                "load": each.cell.load,
                "figures": {name: estimate._asdict() for name, estimate in each.figures.items()},
                "gains": each.gains and {name: found._asdict() for name, found in each.gains.items()},
            }
            for each in result.played
        ],
        "advice": advice(result),
    }


def write_plot(result: Result, path: Path) -> None:
    """Write the Pareto front: first tokens against the tokens of a user, one line a policy, one point a load."""
    series = dict[str, list[Point]]()
    for each in result.played:
        series.setdefault(each.cell.name, []).append(_point(each))
    labels = PlotLabels("What other policies would do", "1 / mean TTFT, 1/s", "tokens/s of a user (1 / mean ITL)")
    path.write_bytes(plotted(series, labels, "png" if path.suffix == ".png" else "svg"))
