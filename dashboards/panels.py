"""A dashboard as data: rows are questions, panels are answers, queries compute them.

Rules that the tests hold: a description names every metric that the panel shows, and what to do; a query names
only metrics that exist; nothing needs a label that is not there.
"""

from typing import Literal

import msgspec

Kind = Literal["lines", "stacked", "stat", "timeline"]
"""Lines; areas that add up; one figure; states over time."""
Unit = Literal["reqps", "s", "percentunit", "short", "cps", "bytes", "none"]
"""As Grafana names them: requests/s, seconds, a ratio shown in percent, a count, counts/s, as it is."""
WIDTH = 24
"""Columns of a row."""


class Query(msgspec.Struct, frozen=True):
    """PromQL; `legend` may name labels: `{{worker}}`. `right`: on the axis at the right.

    `exemplars`: traced requests are shown as points, which lead to their traces.
    """

    expr: str
    legend: str = ""
    right: bool = False
    exemplars: bool = False


class Link(msgspec.Struct, frozen=True):
    """Where a click on a series leads; the address may have Grafana's variables."""

    title: str
    url: str


class Panel(msgspec.Struct, frozen=True):
    """One answer. `bad_from`: the figure that is worth a look, drawn as a threshold."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind
    unit: Unit
    bad_from: float | None
    links: tuple[Link, ...]


class Row(msgspec.Struct, frozen=True):
    """A question, and the panels that answer it."""

    question: str
    panels: tuple[Panel, ...]


def panel(
    title: str,
    description: str,
    *queries: Query,
    kind: Kind = "lines",
    unit: Unit = "short",
    bad_from: float | None = None,
    links: tuple[Link, ...] = (),
) -> Panel:
    """Return the panel of these queries."""
    return Panel(title, description, queries, kind, unit, bad_from, links)


def row(question: str, *panels: Panel) -> Row:
    """Return the row of these panels."""
    return Row(question, panels)


class Variable(msgspec.Struct, frozen=True):
    """The values of a label, of which the reader chooses some or all."""

    name: str
    metric: str
    label: str


class Annotation(msgspec.Struct, frozen=True):
    """Moments that a query finds, drawn over every panel."""

    name: str
    expr: str
    title: str
    color: str


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """One dashboard. `uid` is its address, and never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
