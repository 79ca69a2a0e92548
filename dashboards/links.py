"""Where panels lead: to the router's page of decisions, and to traces.

`${router}` is the address of a router's control plane, which the reader types at the top; `tempo` is the uid of the
provisioned data source. A traced request's point leads to its own decision and its own trace
(`provisioning/datasources/prometheus.yaml`).
"""

import json
from urllib.parse import quote

from dashboards.panels import Link

ROUTER, ROUTER_DEFAULT = "router", "http://127.0.0.1:8001"
TEMPO = "tempo"


def _explored(query: str) -> str:
    """Return the address of Grafana's explorer with a TraceQL query over the time that the panel shows."""
    asked = {"refId": "A", "queryType": "traceql", "query": query, "datasource": {"type": "tempo", "uid": TEMPO}}
    pane = {"datasource": TEMPO, "queries": [asked], "range": {"from": "FROM", "to": "TO"}}
    panes = quote(json.dumps({"traces": pane})).replace("FROM", "${__from}").replace("TO", "${__to}")
    return f"/explore?schemaVersion=1&panes={panes}"


def to_board(name: str) -> Link:
    """Return a link to another dashboard, over the time that is shown."""
    return Link(f"Dashboard {name.capitalize()}", f"/d/kv-router-{name}?${{__url_time_range}}")


DECISIONS_PAGE = Link("Decisions", f"${{{ROUTER}}}/ui/#/decisions")
REQUEST_TRACES = Link("Traces of requests", _explored('{ resource.service.name = "kv-router" && kind = server }'))
EVENT_TRACES = Link("Traces of KV events", _explored('{ name = "kv_events" }'))
