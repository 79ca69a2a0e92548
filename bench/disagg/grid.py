"""The cells of the bench, every layout at every rate, and playing them side by side."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from bench.disagg.figures import DisaggFigures, LayoutComparison, comparisons, figures
from bench.disagg.fleet import DisaggFleet, DisaggSetting
from bench.disagg.layouts import Layout, layout_of
from bench.routing.figures import Slo
from bench.routing.trace import TraceRequest, at_rate
from bench.side_by_side import play_side_by_side

SHORT_RATES, FULL_RATES = (1.0, 2.0, 4.0), (1.0, 2.0, 3.0, 4.0)
_SHORT = ("8a", "2p6d", "4p4d", "5p3d", "5p3d+isl_bounding", "5p3d+isl_or_load")
_FULL = ("8a", "2p6d", "3p5d", "4p4d", "5p3d", "6p2d", "4p4d+isl_or_load", "5p3d+isl_bounding", "5p3d+isl_or_load")


class DisaggCell(NamedTuple):
    """One run: a layout at a speed of arrival."""

    rate: float
    layout: Layout


class Grid(NamedTuple):
    """The varied and the fixed parameters."""

    layouts: tuple[Layout, ...]
    rates: tuple[float, ...]
    slos: tuple[Slo, ...]
    setting: DisaggSetting

    @property
    def cells(self) -> list[DisaggCell]:
        """All of it."""
        return [DisaggCell(rate, layout) for rate, layout in product(self.rates, self.layouts)]


def default_layouts(requests: Sequence[TraceRequest], *, full: bool) -> tuple[Layout, ...]:
    """Return the default layouts of eight GPUs.

    Some have buffers that are too small for the trace's longest prompts, which is the known deadlock: half and a
    quarter of the smallest sufficient power of two. Source: `docs/SOURCES.md` D4.2.
    """
    enough = max(4, 1 << (max(each.isl_tokens for each in requests) - 1).bit_length())
    buffers = (enough, enough // 2, enough // 4) if full else (enough // 4,)
    return tuple(map(layout_of, (*(_FULL if full else _SHORT), *(f"5p3d@{tokens}" for tokens in buffers))))


def play(requests: Sequence[TraceRequest], grid: Grid, cell: DisaggCell) -> DisaggFigures:
    """Play the trace in one cell and return its figures."""
    run = DisaggFleet(cell.layout, grid.setting, at_rate(requests, cell.rate)).run()
    return figures(run, gpus=cell.layout.gpus, slos=grid.slos)


def play_all(
    grid: Grid, requests: Sequence[TraceRequest], *, jobs: int, on_cell: Callable[[], None] = lambda: None
) -> dict[DisaggCell, DisaggFigures]:
    """Play every cell, `jobs` at a time in processes of their own (1: here); `on_cell` after each."""
    found: dict[DisaggCell, DisaggFigures] = {}
    for cell, cell_figures in play_side_by_side(partial(play, requests, grid), grid.cells, jobs):
        found[cell] = cell_figures
        on_cell()
    return {cell: found[cell] for cell in grid.cells}


def compared(grid: Grid, found: dict[DisaggCell, DisaggFigures]) -> list[LayoutComparison]:
    """Return how the aggregated layout compares with the best of those in which nothing failed, at every rate."""
    rows: list[LayoutComparison] = []
    for rate in grid.rates:
        apart = [(each.name, found[DisaggCell(rate, each)]) for each in grid.layouts if not each.aggregated]
        others = [(name, each) for name, each in apart if not each.failed]
        for each in grid.layouts:
            if each.aggregated and others:
                rows += comparisons(rate, (each.name, found[DisaggCell(rate, each)]), others, grid.slos)
    return rows
