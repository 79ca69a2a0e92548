"""Draws a dashboard as a picture: what Grafana would show of the answers to its queries, panel by panel.

The places are those of the committed JSON (`gridPos`); colours, legends and units are Matplotlib's, not Grafana's.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter, StrMethodFormatter
from PIL import Image

from dashboards.boards import WIDTH

WIDTH_PX, ROW_PX, DPI = 1600, 32, 72
LEGENDS_MAX = 6
"""Series in a legend; all are drawn."""
_COLORS_OF_PNG = 160
_SIGNS = {"s": "s", "reqps": "/s", "cps": "/s", "bytes": "B"}
_STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True, "grid.alpha": 0.2,
    "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


class Series(NamedTuple):
    """One series of an answer: its labels, and its points in the order of time (seconds); never NaN."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


Answers = Mapping[tuple[str, str], Sequence[Series]]
"""By a panel's title and a query's refId."""


def picture(board: Mapping[str, Any], answers: Answers) -> tuple[bytes, list[str]]:
    """Return the PNG, and the titles of the panels that show no data."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + 2
    empty, drawn = [], io.BytesIO()
    with style.context(["dark_background", _STYLE]):
        figure = Figure(figsize=(WIDTH_PX / DPI, rows * ROW_PX / DPI), dpi=DPI)
        figure.text(0.008, 1 - 1.2 / rows, board["title"], fontsize=17, va="center")
        for panel in board["panels"]:
            at = panel["gridPos"]
            left, top = at["x"] / WIDTH, 1 - (at["y"] + 2) / rows
            if panel["type"] == "row":
                figure.text(left + 0.008, top - 0.6 / rows, panel["title"], fontsize=13, weight="bold", va="center")
                continue
            size = at["w"] / WIDTH - 0.045, (at["h"] - 2.8) / rows
            axes = figure.add_axes((left + 0.035, top - (at["h"] - 1.6) / rows, *size), title=panel["title"])
            if not _draw(axes, panel, answers):
                empty.append(panel["title"])
        figure.savefig(drawn, format="png")
    return small(drawn), empty


def small(drawn: io.BytesIO) -> bytes:
    """Return the picture with few colours, which takes a quarter of the bytes."""
    made = io.BytesIO()
    few_colours = Image.open(drawn).convert("RGB").quantize(_COLORS_OF_PNG, Image.Quantize.MAXCOVERAGE)
    few_colours.save(made, format="png", optimize=True)
    return made.getvalue()


def _draw(axes: Axes, panel: Mapping[str, Any], answers: Answers) -> bool:
    """Draw one panel; return whether it has data."""
    lines = [
        (_legend(target, each), each.points, target["refId"] in _at_the_right(panel))
        for target in panel["targets"]
        for each in answers.get((panel["title"], target["refId"]), ())
        if each.points
    ]
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    plain = PercentFormatter(1.0) if unit == "percentunit" else StrMethodFormatter("{x:.4g}")
    shown = EngFormatter(_SIGNS[unit], places=1) if unit in _SIGNS else plain
    if not lines or panel["type"] == "stat":
        axes.set_axis_off()
        said = [f"{shown(points[-1][1])}\n{legend}" for legend, points, _ in lines[:3]] or ["no data"]
        axes.text(0.5, 0.5, "\n".join(said), ha="center", va="center", fontsize=14)
        return bool(lines)
    right = axes.twinx() if any(is_right for _, _, is_right in lines) else axes
    is_stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    sums: dict[float, float] = {}
    for number, (legend, points, is_right) in enumerate(lines):
        label, color = legend if number < LEGENDS_MAX else None, f"C{number % 10}"
        times, values = zip(*points, strict=True)
        if panel["type"] == "state-timeline":
            held = [(at_s, 1.0) for at_s, value in points if value]
            axes.broken_barh(held, (-number, 0.8), color=color, label=label)
        elif is_stacked:
            below = [sums.get(at_s, 0.0) for at_s in times]
            sums |= {at_s: sums.get(at_s, 0.0) + value for at_s, value in points}
            axes.fill_between(times, below, [sums[at_s] for at_s in times], color=color, label=label)
        else:
            (right if is_right else axes).plot(times, values, color=color, label=label, marker="." * (len(times) == 1))
    if panel["type"] == "state-timeline":
        axes.set_yticks([])
    axes.yaxis.set_major_formatter(shown)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    handles = [
        *axes.get_legend_handles_labels()[0],
        *(right.get_legend_handles_labels()[0] if right is not axes else ()),
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.03, -0.1), ncols=3)
    return True


def _at_the_right(panel: Mapping[str, Any]) -> set[str]:
    """Return the refIds of the queries whose series have the axis at the right."""
    return {
        each["matcher"]["options"]
        for each in panel["fieldConfig"].get("overrides", ())
        if {"id": "custom.axisPlacement", "value": "right"} in each["properties"]
    }


def _legend(target: Mapping[str, Any], series: Series) -> str:
    form = target.get("legendFormat") or ", ".join(f"{name}={value}" for name, value in series.labels.items())
    return re.sub(r"{{(\w+)}}", lambda found: series.labels.get(found[1], ""), form).strip()
