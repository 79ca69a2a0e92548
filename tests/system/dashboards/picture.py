"""Draws a dashboard as a picture: what Grafana would show of the answers to its queries, panel by panel.

The places are those of the committed JSON (`gridPos`); colours, legends and units are close to Grafana's, not equal.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from dashboards.boards import WIDTH

COLUMN_PX, ROW_PX, DPI = 1600 / WIDTH, 32, 72
"""The size of a cell of the grid: a picture is 1,600 pixels wide."""
LEGENDS_MAX = 6
"""Series in a legend; all are drawn."""
NO_DATA = "no data"
_COLORS_OF_PNG = 160
_PAGE, _PANEL, _TEXT, _DIM, _GRID = "#111217", "#181b1f", "#ccccdc", "#8e8e9c", "#2a2e35"
_LINES = (
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#fade2a"),
    *("#96d98d", "#ffb357", "#ff7383", "#ca95e5"),
)
_NAMED = {"green": "#73bf69", "orange": "#ff9830", "purple": "#b877d9"}
_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_BELOW_1 = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"))
_SIGNS = {"s": "s", "reqps": "/s", "cps": "/s", "bytes": "B"}


class Series(NamedTuple):
    """One series of an answer: its labels, and its points in the order of time (seconds); never NaN."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


Answers = Mapping[tuple[str, str], Sequence[Series]]
"""By a panel's title and a query's refId."""


class _Line(NamedTuple):
    legend: str
    points: Sequence[tuple[float, float]]
    is_at_the_right: bool


def picture(board: Mapping[str, Any], answers: Answers) -> tuple[bytes, list[str]]:
    """Return the PNG, and the titles of the panels that show no data."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + 2
    with mpl.rc_context({"font.size": 10, "text.color": _TEXT, "axes.labelcolor": _DIM, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(WIDTH * COLUMN_PX / DPI, rows * ROW_PX / DPI), dpi=DPI, facecolor=_PAGE)
        figure.text(0.008, 1 - 1.2 / rows, board["title"], fontsize=17, va="center")
        empty = [panel["title"] for panel in board["panels"] if not _drawn(figure, panel, answers, rows)]
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", facecolor=_PAGE)
    return small(drawn), empty


def small(drawn: io.BytesIO) -> bytes:
    """Return the picture with few colours, which takes a quarter of the bytes."""
    made = io.BytesIO()
    few_colours = Image.open(drawn).convert("RGB").quantize(_COLORS_OF_PNG, Image.Quantize.MAXCOVERAGE)
    few_colours.save(made, format="png", optimize=True)
    return made.getvalue()


def _drawn(figure: Figure, panel: Mapping[str, Any], answers: Answers, rows: int) -> bool:
    """Draw one panel; return whether it has data, as rows always have."""
    at = panel["gridPos"]
    left, top = at["x"] / WIDTH, 1 - (at["y"] + 2) / rows
    if panel["type"] == "row":
        figure.text(left + 0.008, top - 0.6 / rows, panel["title"], fontsize=13, va="center", weight="bold")
        return True
    box = figure.add_axes((left + 0.002, top - (at["h"] - 0.2) / rows, at["w"] / WIDTH - 0.004, (at["h"] - 0.3) / rows))
    box.set_facecolor(_PANEL)
    _bare(box)
    figure.text(left + 0.008, top - 0.75 / rows, panel["title"], fontsize=11.5, va="center")
    at_the_right = _at_the_right(panel)
    lines = [
        _Line(_legend(target, each), each.points, target["refId"] in at_the_right)
        for target, each in _of(panel, answers)
        if each.points
    ]
    wide = 0.045 if at["w"] < WIDTH else 0.03
    inner = (left + wide, top - (at["h"] - 2.2) / rows, at["w"] / WIDTH - wide - 0.012, (at["h"] - 3.6) / rows)
    axes = figure.add_axes(inner)
    axes.set_facecolor(_PANEL)
    if not lines:
        _bare(axes)
        axes.text(0.5, 0.5, NO_DATA, ha="center", va="center", color=_DIM, fontsize=10)
        return False
    _DRAW[panel["type"]](axes, panel, lines)
    return True


def _of(panel: Mapping[str, Any], answers: Answers) -> list[tuple[Mapping[str, Any], Series]]:
    return [
        (target, each) for target in panel["targets"] for each in answers.get((panel["title"], target["refId"]), ())
    ]


def _at_the_right(panel: Mapping[str, Any]) -> set[str]:
    """Return the refIds of the queries whose series have the axis at the right."""
    return {
        each["matcher"]["options"]
        for each in panel["fieldConfig"]["overrides"]
        if {"id": "custom.axisPlacement", "value": "right"} in each["properties"]
    }


def _legend(target: Mapping[str, Any], series: Series) -> str:
    form = target.get("legendFormat") or ", ".join(f"{name}={value}" for name, value in series.labels.items())
    return re.sub(r"{{(\w+)}}", lambda found: series.labels.get(found[1], ""), form).strip()


def _unit(panel: Mapping[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", ""))


def shown(value: float, unit: str) -> str:
    """Return a figure as a person reads it: `unit` as Grafana names it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if math.isinf(value):
        return "∞"
    scales = (*_SCALES, *(_BELOW_1 if unit == "s" else ()))
    scale, letter = next(((scale, letter) for scale, letter in scales if abs(value) >= scale), (1.0, ""))
    return f"{value / scale:.3g} {letter}{_SIGNS.get(unit, '')}".rstrip()


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _timed(axes: Axes, panel: Mapping[str, Any]) -> None:
    axes.tick_params(colors=_DIM, length=0)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at_s, _: f"{at_s:.0f} s"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, _unit(panel))))


def _colors(panel: Mapping[str, Any], lines: Sequence[_Line]) -> list[str]:
    """Return the colour of each line: that of an override of its name, or the next of all."""
    fixed = {
        each["matcher"]["options"].strip("/"): _NAMED[each["properties"][0]["value"]["fixedColor"]]
        for each in panel["fieldConfig"]["overrides"]
        if each["matcher"]["id"] == "byRegexp"
    }
    return [
        next((color for name, color in fixed.items() if re.search(name, line.legend)), _LINES[number % len(_LINES)])
        for number, line in enumerate(lines)
    ]


def _draw_legend(axes: Axes, legends: Sequence[str], colors: Sequence[str]) -> None:
    more = len(legends) - LEGENDS_MAX
    names = [*legends[:LEGENDS_MAX], *([f"and {more} more"] if more > 0 else [])]
    shown_colors = [*colors[:LEGENDS_MAX], _DIM][: len(names)]
    handles = [mpl.lines.Line2D([], [], color=color, linewidth=2) for color in shown_colors]
    corner = -0.02 / axes.get_position().width, -0.13
    axes.legend(
        handles, names, loc="upper left", bbox_to_anchor=corner, ncols=3, frameon=False, fontsize=9,
        labelcolor=_TEXT, handlelength=1, columnspacing=1, borderpad=0, labelspacing=0.2,
    )  # fmt: skip


def _draw_lines(axes: Axes, panel: Mapping[str, Any], lines: Sequence[_Line]) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    sums: dict[float, float] = {}
    colors = _colors(panel, lines)
    right = axes.twinx() if any(line.is_at_the_right for line in lines) else axes
    for number, line in enumerate(lines):
        times = [at_s for at_s, _ in line.points]
        below = [sums.get(at_s, 0.0) if is_stacked else 0.0 for at_s in times]
        above = [bottom + value for bottom, (_, value) in zip(below, line.points, strict=True)]
        if is_stacked:
            sums |= dict(zip(times, above, strict=True))
            axes.fill_between(times, below, above, color=colors[number], alpha=0.55, linewidth=0)
        marker = "." if len(times) == 1 else ""
        side = right if line.is_at_the_right else axes
        side.plot(times, above, color=colors[number], linewidth=1.6, marker=marker, clip_on=False, zorder=3)
    for side in {axes, right}:
        _timed(side, panel)
        values = [value for line in lines for _, value in line.points if line.is_at_the_right == (side is not axes)]
        if values and min(values) >= 0:
            side.set_ylim(0, 1.08 * max([*values, *(sums.values() if side is axes else ())]) or 1)
    if right is not axes:
        right.grid(visible=False)
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, "")))
    _draw_legend(axes, [line.legend for line in lines], colors)


def _draw_stat(axes: Axes, panel: Mapping[str, Any], lines: Sequence[_Line]) -> None:
    _bare(axes)
    for number, line in enumerate(lines[:3]):
        x = (number + 0.5) / min(3, len(lines))
        value = shown(line.points[-1][1], _unit(panel))
        axes.text(x, 0.6, value, ha="center", va="center", fontsize=26, color=_LINES[0], transform=axes.transAxes)
        axes.text(x, 0.1, line.legend, ha="center", va="center", color=_DIM, transform=axes.transAxes)


def _draw_timeline(axes: Axes, panel: Mapping[str, Any], lines: Sequence[_Line]) -> None:
    colors = _colors(panel, lines)
    for number, line in enumerate(lines):
        ends = [at_s for at_s, _ in line.points[1:]] + [line.points[-1][0] + 1]
        for (at_s, value), end_s in zip(line.points, ends, strict=True):
            axes.barh(
                -number, end_s - at_s, left=at_s, height=0.8, color=colors[number] if value else _GRID, linewidth=0
            )
    _timed(axes, panel)
    axes.set_yticks([])
    for number, line in enumerate(lines):
        axes.text(line.points[0][0], -number, f" {line.legend}", va="center", color=_PAGE, fontsize=9)


_DRAW: dict[str, Callable[[Axes, Mapping[str, Any], Sequence[_Line]], None]] = {
    "timeseries": _draw_lines,
    "stat": _draw_stat,
    "state-timeline": _draw_timeline,
}
