"""The targets of the grid, and in how many cells each is reached. Source: `docs/BENCHMARKS.md`.

hit rate     kv's is at least 0.9 of the bound's, in all cells
TTFT         kv's p50, and p99, are no worse than round robin's, in 8 of 9 cells each (in all but a ninth)
predicted    predicted-ttft's p50 is no worse than kv's in 7 of 9 cells, its p99 better
control      without sharing nothing is cached, in any mode
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from bench.routing.figures import RoutingFigures
from bench.routing.grid import GridResult, RoutingCell, control_cells

BOUND_RATIO = 0.9
P50, P99 = 0, 2
"""Indices into `QUANTILES`."""


class RoutingVerdict(NamedTuple):
    """One target: in how many of `of` cells it was reached, how many are needed, and the cells that lost."""

    target: str
    reached: int
    of: int
    needed: int
    losing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the target is reached."""
        return self.reached >= self.needed


def verdicts(result: GridResult) -> Iterator[RoutingVerdict]:
    """Yield the verdict on every target that the modes of the grid allow to judge, for every slowdown."""
    modes = result.shape.modes
    for slowdown in result.shape.slowdowns:
        suffix = "" if result.shape.slowdowns == (1.0,) else f" (engines x{slowdown:g})"
        if "kv" in modes:
            yield _hit_rate(result, slowdown, suffix)
        if {"kv", "round-robin"} <= set(modes):
            for index, name in ((P50, "p50"), (P99, "p99")):
                target = f"kv: TTFT {name} no worse than round robin{suffix}"
                yield _compare(result, slowdown, ("kv", "round-robin"), (index, target, 1 / 9), _no_worse)
        if {"kv", "predicted-ttft"} <= set(modes):
            for index, name, better in ((P50, "p50 no worse", _no_worse), (P99, "p99 better", _better)):
                target = f"predicted-ttft: TTFT {name} than kv{suffix}"
                yield _compare(result, slowdown, ("predicted-ttft", "kv"), (index, target, 2 / 9), better)
    control = [result.figures[cell] for cell in control_cells(result.shape)]
    if control:
        lost = [f"{each.hit_rate:.2%}" for each in control if each.hit_rate]
        target = "control: nothing shared, nothing cached"
        yield _verdict(target, lost, len(control), allowed=0.0)


def _no_worse(left: float, right: float) -> bool:
    return left <= right


def _better(left: float, right: float) -> bool:
    return left < right


def _pairs(result: GridResult, slowdown: float) -> Iterator[tuple[str, RoutingCell]]:
    """Yield the cells of the grid at one slowdown by name, with no mode yet."""
    for workers, rate in product(result.shape.workers, result.shape.rates):
        yield f"{workers} workers x {rate:g}", RoutingCell(workers, rate, "", result.shape.lags_s[0], slowdown)


def _hit_rate(result: GridResult, slowdown: float, suffix: str) -> RoutingVerdict:
    lost, of = [], 0
    for name, cell in _pairs(result, slowdown):
        ratio = ratio_to_bound(result.figures[cell._replace(mode="kv")], result.bound[cell.workers])
        of += 1
        if ratio < BOUND_RATIO:
            lost.append(f"{name}: {ratio:.2f}")
    return _verdict(f"kv: hit rate at least {BOUND_RATIO} of the bound{suffix}", lost, of, allowed=0.0)


def ratio_to_bound(found: RoutingFigures, bound: float) -> float:
    """Return hit rate over the bound's; 1 where the bound has no hits either."""
    return found.hit_rate / bound if bound else 1.0


def _compare(
    result: GridResult,
    slowdown: float,
    modes: tuple[str, str],
    target: tuple[int, str, float],
    holds: Callable[[float, float], bool],
) -> RoutingVerdict:
    index, text, allowed = target
    lost, of = [], 0
    for name, cell in _pairs(result, slowdown):
        left, right = (result.figures[cell._replace(mode=mode)].ttft_s[index] for mode in modes)
        of += 1
        if not holds(left, right):
            lost.append(f"{name}: {left * 1000:.0f} ms against {right * 1000:.0f}")
    return _verdict(text, lost, of, allowed=allowed)


def _verdict(target: str, lost: Sequence[str], of: int, *, allowed: float) -> RoutingVerdict:
    return RoutingVerdict(target, of - len(lost), of, of - int(of * allowed), tuple(lost))
