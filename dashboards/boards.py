"""All dashboards, and what they have in common: their variables, and the moments that are drawn over every panel.

There is no variable for a cluster, because no metric has such a label. A Prometheus that scrapes several clusters has
to add one.
"""

from dashboards.agents import AGENTS
from dashboards.decisions import DECISIONS
from dashboards.engines import ENGINES
from dashboards.fleet import FLEET
from dashboards.index import INDEX
from dashboards.overview import OVERVIEW
from dashboards.panels import Annotation, Board, Variable
from dashboards.phases import PHASES_BOARD
from dashboards.pools import POOLS
from dashboards.promql import selected
from dashboards.router import ROUTER
from dashboards.tenants import TENANTS_AND_COST

BOARDS: dict[str, Board] = {
    "overview": OVERVIEW,
    "fleet": FLEET,
    "decisions": DECISIONS,
    "index": INDEX,
    "phases": PHASES_BOARD,
    "agents": AGENTS,
    "engines": ENGINES,
    "router": ROUTER,
    "pools": POOLS,
    "tenants": TENANTS_AND_COST,
}
"""By the name of their file."""
VARIABLES = (Variable("model", "requests_total", "model"), Variable("worker", "rank_trust", "worker"))
_FIT = f"max by (worker) ({selected('rank_fit')})"
_FIT_BEFORE = f"max by (worker) ({selected('rank_fit')} offset 1m)"
_ROUTER_SINCE = f"count({selected('workers')} and {selected('workers')} offset 1m)"
ANNOTATIONS = (
    Annotation(
        name="router restart",
        expr=f"(resets({selected('event_loop_lag_seconds_count')}[1m]) > 0) and on (instance) {selected('workers')}",
        title="router {{instance}} began anew",
        color="purple",
    ),
    Annotation(
        name="worker up",
        expr=f"({_FIT} == 1) unless ({_FIT_BEFORE} == 1)",
        title="{{worker}} takes work",
        color="green",
    ),
    Annotation(
        name="worker down",
        expr=f"(({_FIT_BEFORE} == 1) unless ({_FIT} == 1)) and on () ({_ROUTER_SINCE} > 0)",
        title="{{worker}} takes no more work",
        color="red",
    ),
)
