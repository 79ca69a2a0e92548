"""The dashboards as data (`boards.yaml`): rows are questions, panels are answers, queries of PromQL compute them.

Tests check that a description names every metric of its panel, and what to do, and that a query names only metrics and
labels that exist. There is no variable for a cluster, because no metric has such a label: a Prometheus that scrapes
several clusters has to add one.

A panel's `links` lead to the router's page of decisions (`${router}` is the address of a router's control plane, which
the reader types at the top), to traces in the provisioned data source `tempo`, and to other dashboards. A traced
request's point leads to its own decision and its own trace (`provisioning/datasources/prometheus.yaml`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

Kind = Literal["lines", "stacked", "stat", "timeline"]
"""Lines; areas that add up; one figure; states over time."""
Unit = Literal["reqps", "s", "percentunit", "short", "cps", "bytes", "none"]
"""As Grafana names them: requests/s, seconds, a ratio shown in percent, a count, counts/s, bytes, as it is."""
WIDTH = 24
"""Columns of a row."""
_ROW_HEIGHT, _PANEL_HEIGHT, _LINE = 1, 8, 3
"""Heights of a row's title and of a panel, and the most panels in a line."""
_REF_IDS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TRUST_COLORS = {"EXACT": "green", "DEGRADED": "orange", "FALLBACK": "purple"}
"""As on the web page (`router/web/assets/style.css`)."""
_TRACES = {
    "request traces": ("Traces of requests", '{ resource.service.name = "kv-router" && kind = server }'),
    "event traces": ("Traces of KV events", '{ name = "kv_events" }'),
}


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer. `queries` have PromQL by legend, which may name labels: `{{worker}}`.

    `right`: legends of queries on the right axis; `exemplars`: legends of queries that show traced requests as points.
    `bad_from`: a figure from there on is worth a look; drawn as a threshold. `links`: where a click on a series leads.
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


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`frame`: what all dashboards have; `kinds`: what all panels of a kind have; `boards`: by their files' names."""

    frame: dict[str, Any]
    kinds: dict[Kind, dict[str, Any]]
    boards: dict[str, Board]


CONTENT = msgspec.yaml.decode(Path(__file__).with_name("boards.yaml").read_bytes(), type=Content)


def link(name: str) -> tuple[str, str]:
    """Return the title and the address of a link; the address has Grafana's variables."""
    if name == "decisions":
        return "Decisions", "${router}/ui/#/decisions"
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


def rendered(board: Board) -> bytes:
    """Return the JSON that Grafana loads; the same content gives the same bytes."""
    own = {"uid": board.uid, "title": board.title, "description": board.description, "panels": [*_placed(board)]}
    return json.dumps(CONTENT.frame | own, indent=2, sort_keys=True).encode() + b"\n"


def _placed(board: Board) -> Iterator[dict[str, Any]]:
    """Yield rows and panels in their order, each with its id and its place; the panels of a line are equally wide."""
    top, panel_id = 0, 0
    for row in board.rows:
        panel_id += 1
        place = {"h": _ROW_HEIGHT, "w": WIDTH, "x": 0, "y": top}
        yield {"type": "row", "title": row.question, "collapsed": False, "panels": [], "id": panel_id, "gridPos": place}
        top += _ROW_HEIGHT
        lines = -(-len(row.panels) // _LINE)
        for at in range(lines):
            panels = row.panels[len(row.panels) * at // lines : len(row.panels) * (at + 1) // lines]
            width = WIDTH // len(panels)
            for number, panel in enumerate(panels):
                panel_id += 1
                place = {"h": _PANEL_HEIGHT, "w": width, "x": number * width, "y": top}
                yield _panel(panel) | {"id": panel_id, "gridPos": place}
            top += _PANEL_HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    kind: dict[str, Any] = json.loads(json.dumps(CONTENT.kinds[panel.kind]))
    field: dict[str, Any] = kind["fieldConfig"]["defaults"]
    field["unit"] = panel.unit
    if panel.bad_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.bad_from}]
        field["thresholds"] = {"mode": "absolute", "steps": steps}
        field["custom"]["thresholdsStyle"] = {"mode": "dashed"}
    if panel.links:
        field["links"] = [{"title": title, "url": url} for title, url in map(link, panel.links)]
    targets = [
        {"expr": expr, "legendFormat": legend, "refId": ref_id, "range": True}
        | ({"exemplar": True} if legend in panel.exemplars else {})
        for ref_id, (legend, expr) in zip(_REF_IDS, panel.queries.items(), strict=False)
    ]
    if overrides := [*_at_the_right(panel), *_trust_colours(panel)]:
        kind["fieldConfig"]["overrides"] = overrides
    own = {"title": panel.title, "description": panel.description, "datasource": _DATASOURCE, "targets": targets}
    return kind | own


def _at_the_right(panel: Panel) -> Iterator[dict[str, Any]]:
    """Yield the overrides that draw queries by the right axis, whose unit is always `short`."""
    looks = [{"id": "custom.axisPlacement", "value": "right"}, {"id": "unit", "value": "short"}]
    for ref_id, legend in zip(_REF_IDS, panel.queries, strict=False):
        if legend in panel.right:
            yield {"matcher": {"id": "byFrameRefID", "options": ref_id}, "properties": looks}


def _trust_colours(panel: Panel) -> Iterator[dict[str, Any]]:
    for trust, color in TRUST_COLORS.items() if any("{{trust}}" in legend for legend in panel.queries) else ():
        look = {"id": "color", "value": {"mode": "fixed", "fixedColor": color}}
        yield {"matcher": {"id": "byRegexp", "options": f"/{trust}$/"}, "properties": [look]}
