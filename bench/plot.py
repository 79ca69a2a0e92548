"""Plots lines of measured runs: one line a series, one point a load, as SVG or PNG.

The same figures give the same SVG. Filled points are those of runs that served their users. If both axes are better
when larger, a dashed line joins those filled points that are on the `frontier`, and only their loads are written.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

_COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6d31", "#7f7f7f", "#b2182b")
"""The first seven are Okabe and Ito's, without the yellow: distinguishable with colour blindness."""


class Point(NamedTuple):
    """One run. `load` is the label of its point."""

    x: float
    y: float
    load: str
    is_served: bool
    """Whether it counts for the frontier; the caller decides."""


class PlotLabels(NamedTuple):
    """The title of a plot, and the labels of its axes."""

    title: str
    x: str
    y: str


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points, left to right, that no other point beats on one axis without being worse on the other."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.x, -each.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best[::-1]


def plotted(
    lines: Mapping[str, Sequence[Point]],
    labels: PlotLabels,
    kind: Literal["svg", "png"] = "svg",
    *,
    has_frontier: bool = True,
) -> bytes:
    """Return the plot. `lines` has each series' points in the order of load; at least one series must have a point."""
    with mpl.rc_context(
        {"svg.hashsalt": "kv-router", "svg.fonttype": "none", "font.size": 9}
    ):  # the same bytes each time
        figure = Figure(figsize=(9.0, 5.8), layout="constrained")
        axes = figure.subplots()
        axes.set(title=labels.title, xlabel=labels.x, ylabel=labels.y)
        axes.grid(visible=True, color="#e5e5e5")
        served = [each for line in lines.values() for each in line if each.is_served]
        best = frontier(served) if has_frontier else []
        axes.plot(*_columns(best), color="#999999", linewidth=5, alpha=0.35, linestyle="--")
        for number, (name, line) in enumerate(lines.items()):
            color, is_again = _COLORS[number % len(_COLORS)], number >= len(_COLORS)
            axes.plot(*_columns(line), color=color, linewidth=1.6, linestyle="--" if is_again else "-", label=name)
            faces = [color if each.is_served else "#ffffff" for each in line]
            axes.scatter(*_columns(line), s=28, c=faces, edgecolors=color, zorder=3)
        for each in best if has_frontier else served:
            axes.annotate(each.load, (each.x, each.y), xytext=(5, 5), textcoords="offset points", fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", frameon=False)
        written = io.BytesIO()
        figure.savefig(written, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return written.getvalue()


def _columns(line: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [each.x for each in line], [each.y for each in line]
