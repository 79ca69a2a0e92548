"""The dashboards as data (`boards.yaml`): rows are questions, panels are answers, queries of PromQL compute them.

Rules that the tests hold: a description names every metric that the panel shows, and what to do; a query names only
metrics that exist; nothing needs a label that is not there. There is no variable for a cluster, because no metric has
such a label: a Prometheus that scrapes several clusters has to add one.

A panel's `links` lead to the router's page of decisions (`${router}` is the address of a router's control plane, which
the reader types at the top), to traces in the provisioned data source `tempo`, and to other dashboards. A traced
request's point leads to its own decision and its own trace (`provisioning/datasources/prometheus.yaml`).
"""

import json
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

Kind = Literal["lines", "stacked", "stat", "timeline"]
"""Lines; areas that add up; one figure; states over time."""
Unit = Literal["reqps", "s", "percentunit", "short", "cps", "bytes", "none"]
"""As Grafana names them: requests/s, seconds, a ratio shown in percent, a count, counts/s, as it is."""
WIDTH = 24
"""Columns of a row."""
ROUTER, ROUTER_DEFAULT = "router", "http://127.0.0.1:8001"
_TRACES = {
    "request traces": ("Traces of requests", '{ resource.service.name = "kv-router" && kind = server }'),
    "event traces": ("Traces of KV events", '{ name = "kv_events" }'),
}


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer. `queries` have PromQL by legend, which may name labels: `{{worker}}`.

    `right`: legends of the queries that use the right axis; `exemplars`: of those that show traced requests as points.
    `bad_from`: the figure that is worth a look, drawn as a threshold. `links`: where a click on a series leads.
    """

    title: str
    description: str
    queries: dict[str, str]
    kind: Kind = "lines"
    unit: Unit = "short"
    bad_from: int | float | None = None
    links: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    exemplars: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, and the panels that answer it."""

    question: str
    panels: tuple[Panel, ...]


class Board(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One dashboard. `uid` is its address, and never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


class Annotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moments that a query finds, drawn over every panel."""

    name: str
    expr: str
    title: str
    color: str


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`variables`: by label, the metric from which a reader chooses its values. `boards`: by the name of their file."""

    variables: dict[str, str]
    annotations: tuple[Annotation, ...]
    boards: dict[str, Board]


CONTENT = msgspec.yaml.decode(Path(__file__).with_name("boards.yaml").read_bytes(), type=Content)


def link(name: str) -> tuple[str, str]:
    """Return the title and the address of a link; the address has Grafana's variables."""
    if name == "decisions":
        return "Decisions", f"${{{ROUTER}}}/ui/#/decisions"
    if name in _TRACES:
        title, query = _TRACES[name]
        return title, _explored(query)
    board = name.removeprefix("board ")
    return f"Dashboard {board.capitalize()}", f"/d/{CONTENT.boards[board].uid}?${{__url_time_range}}"


def _explored(query: str) -> str:
    """Return the address of Grafana's explorer with a TraceQL query over the time that the panel shows."""
    asked = {"refId": "A", "queryType": "traceql", "query": query, "datasource": {"type": "tempo", "uid": "tempo"}}
    pane = {"datasource": "tempo", "queries": [asked], "range": {"from": "FROM", "to": "TO"}}
    panes = quote(json.dumps({"traces": pane})).replace("FROM", "${__from}").replace("TO", "${__to}")
    return f"/explore?schemaVersion=1&panes={panes}"
