"""Plots what a GPU gives against what a user gets, as an SVG: one line a layout, one point a load.

    x   output tokens a second and user, 1 / ITL p50
    y   output tokens a second and GPU, of all users

The same figures give the same bytes. To the right and above is better. Filled points are those of runs that served
their users: neither axis shows how long a first token took. The dashed line joins the filled points that no other one
beats in both ways; their loads stand beside them.
"""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

_COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6d31", "#7f7f7f", "#b2182b")
"""The first eight but one: Okabe and Ito's, distinguishable with colour blindness."""


class Point(NamedTuple):
    """One run. `load` is the label of its point."""

    tokens_s_user: float
    tokens_s_gpu: float
    load: str
    is_served: bool
    """Whether it counts for the frontier; the caller decides."""


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points, from left to right, than which no other is as good in one way and better in the other."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.tokens_s_user, -each.tokens_s_gpu)):
        if not best or point.tokens_s_gpu > best[-1].tokens_s_gpu:
            best.append(point)
    return best[::-1]


def pareto_svg(lines: Mapping[str, Sequence[Point]], title: str) -> str:
    """Return the plot. `lines` has each layout's points in the order of load; one of them has a point."""
    with mpl.rc_context(
        {"svg.hashsalt": "kv-router", "svg.fonttype": "none", "font.size": 9}
    ):  # the same bytes each time
        figure = Figure(figsize=(9.0, 5.8), layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel="output tokens/s of a user (1 / ITL p50)", ylabel="output tokens/s of a GPU")
        axes.grid(visible=True, color="#e5e5e5")
        best = frontier([each for line in lines.values() for each in line if each.is_served])
        axes.plot(*_columns(best), color="#999999", linewidth=5, alpha=0.35, linestyle="--")
        for number, (name, line) in enumerate(lines.items()):
            color, is_again = _COLORS[number % len(_COLORS)], number >= len(_COLORS)
            axes.plot(*_columns(line), color=color, linewidth=1.6, linestyle="--" if is_again else "-", label=name)
            faces = [color if each.is_served else "#ffffff" for each in line]
            axes.scatter(*_columns(line), s=28, c=faces, edgecolors=color, zorder=3)
        for each in best:
            point = (each.tokens_s_user, each.tokens_s_gpu)
            axes.annotate(each.load, point, xytext=(5, 5), textcoords="offset points", fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _columns(line: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [each.tokens_s_user for each in line], [each.tokens_s_gpu for each in line]
