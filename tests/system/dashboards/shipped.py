"""The committed dashboards as Grafana gets them: their panels' queries, their variables and their annotations."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

import promql_parser

from dashboards.boards import CONTENT

BOARD_NAMES = tuple(CONTENT.boards)


class Shown(NamedTuple):
    """One query, and where it stands."""

    board: str
    panel: str
    ref_id: str
    expr: str
    is_range: bool
    has_exemplars: bool = False

    def __str__(self) -> str:
        return f"{self.board}, {self.panel}, {self.ref_id}"


def board(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("dashboards").joinpath("grafana", f"{name}.json").read_bytes())
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    """Return the panels that show figures."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Shown]:
    return [
        Shown(
            name,
            panel["title"],
            target["refId"],
            target["expr"],
            bool(target.get("range")),
            bool(target.get("exemplar")),
        )
        for name in BOARD_NAMES
        for panel in panels(name)
        for target in panel["targets"]
    ]


def annotation_queries() -> list[Shown]:
    return [
        Shown(name, each["name"], each["target"]["refId"], each["target"]["expr"], is_range=True)
        for name in BOARD_NAMES
        for each in board(name)["annotations"]["list"]
    ]


class LabelValues(NamedTuple):
    """A variable: the values of a label of a metric."""

    board: str
    name: str
    metric: str
    label: str


def variables() -> list[LabelValues]:
    """Return those that ask for values; the one of the data source does not."""
    return [
        LabelValues(name, each["name"], *_arguments(each["query"]["query"]))
        for name in BOARD_NAMES
        for each in board(name)["templating"]["list"]
        if each["type"] == "query"
    ]


def _arguments(query: str) -> tuple[str, str]:
    assert query.startswith("label_values(")
    metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
    return metric, label


def substituted(expr: str, *, interval: str, window: str) -> str:
    """Return the PromQL that Grafana sends: All is chosen of every variable."""
    values = {"$__rate_interval": interval, "$__range": window, "$model": ".*", "$worker": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def selectors(expr: str) -> Iterator[promql_parser.VectorSelector]:
    """Yield every selector of series in a query; raise `ValueError` where it is no PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(substituted(expr, interval="1m", window="1h")), visit)
    yield from found
