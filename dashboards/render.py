"""Content to the JSON that Grafana loads: ids by place, refIds by order, so that the same content is the same bytes.

The builders of the SDK set neither a panel's id nor a query's refId, and Grafana needs both: alerts, links and the
order of a panel's queries go by them.
"""

import json
from collections.abc import Callable, Iterator

from grafana_foundation_sdk.builders import common, dashboard, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as look
from grafana_foundation_sdk.models import dashboard as grid

from dashboards.boards import CONTENT, ROUTER, ROUTER_DEFAULT, WIDTH, Annotation, Board, Kind, Panel, link

TAG = "kv-router"
_DATASOURCE = look.DataSourceRef(type_val="prometheus", uid="${datasource}")
_REF_IDS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROW_HEIGHT, _PANEL_HEIGHT, _LINE = 1, 8, 3
"""Of a line: so many panels at most."""
_GOOD, _BAD = "green", "red"
TRUST_COLORS = {"EXACT": "green", "DEGRADED": "orange", "FALLBACK": "purple"}
"""As on the web page (`router/web/assets/style.css`)."""

AnyPanel = timeseries.Panel | stat.Panel | statetimeline.Panel


def rendered(board: Board) -> bytes:
    """Return a dashboard's JSON; the same content gives the same bytes."""
    built = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags([TAG])
    built.time("now-1h", "now").refresh("10s").timezone("browser").tooltip(grid.DashboardCursorSync.CROSSHAIR)
    built.editable()
    built.link(_to_the_others())
    built.with_variable(dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"))
    for label, metric in CONTENT.variables.items():
        built.with_variable(_variable(label, metric))
    built.with_variable(dashboard.TextBoxVariable(ROUTER).label("router page").default_value(ROUTER_DEFAULT))
    for annotation in CONTENT.annotations:
        built.annotation(_annotation(annotation))
    for each in _placed(board):
        if isinstance(each, dashboard.Row):
            built.with_row(each)
        else:
            built.with_panel(each)
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True).encode() + b"\n"


def _placed(board: Board) -> Iterator[dashboard.Row | AnyPanel]:
    """Yield rows and panels in their order, each with its id and its place; lines of a row have equal panels."""
    top, panel_id = 0, 0
    for row in board.rows:
        panel_id += 1
        here = grid.GridPos(h=_ROW_HEIGHT, w=WIDTH, x=0, y=top)
        yield dashboard.Row(row.question).id(panel_id).grid_pos(here)
        top += _ROW_HEIGHT
        lines = -(-len(row.panels) // _LINE)
        for at in range(lines):
            panels = row.panels[len(row.panels) * at // lines : len(row.panels) * (at + 1) // lines]
            width = WIDTH // len(panels)
            for place, panel in enumerate(panels):
                panel_id += 1
                here = grid.GridPos(h=_PANEL_HEIGHT, w=width, x=place * width, y=top)
                yield _panel(panel).id(panel_id).grid_pos(here)
            top += _PANEL_HEIGHT


def _panel(panel: Panel) -> AnyPanel:
    built = _BY_KIND[panel.kind](panel)
    built.title(panel.title).description(panel.description).unit(panel.unit).datasource(_DATASOURCE)
    if panel.bad_from is not None:
        steps = [grid.Threshold(value=None, color=_GOOD), grid.Threshold(value=panel.bad_from, color=_BAD)]
        built.thresholds(dashboard.ThresholdsConfig().mode(grid.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.links:
        built.data_links([dashboard.DashboardLink(title).url(url) for title, url in map(link, panel.links)])
    for ref_id, (legend, expr) in zip(_REF_IDS, panel.queries.items(), strict=False):
        if "{{trust}}" in legend:
            for trust, color in TRUST_COLORS.items():
                fixed = {"mode": "fixed", "fixedColor": color}
                built.override_by_regexp(f"/{trust}$/", [grid.DynamicConfigValue(id_val="color", value=fixed)])
        target = Dataquery().expr(expr).ref_id(ref_id).legend_format(legend).datasource(_DATASOURCE)
        if legend in panel.exemplars:
            target = target.exemplar(exemplar=True)
        built.with_target(target.range())
    return built


def _lines(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().line_width(1).fill_opacity(8).show_points(look.VisibilityMode.NEVER).legend(_legend())
    for ref_id, legend in zip(_REF_IDS, panel.queries, strict=False):
        if legend in panel.right:
            at_the_right = {"custom.axisPlacement": "right", "unit": "short"}  # else that of the left axis
            built.override_by_query(
                ref_id, [grid.DynamicConfigValue(id_val=at, value=to) for at, to in at_the_right.items()]
            )
    if panel.bad_from is not None:
        built.thresholds_style(common.GraphThresholdsStyleConfig().mode(look.GraphThresholdsStyleMode.DASHED))
    return built


def _stacked(panel: Panel) -> timeseries.Panel:
    return _lines(panel).fill_opacity(60).stacking(common.StackingConfig().mode(look.StackingMode.NORMAL).group("A"))


def _stat(_: Panel) -> stat.Panel:
    return stat.Panel().reduce_options(_last()).graph_mode(look.BigValueGraphMode.AREA)


def _timeline(_: Panel) -> statetimeline.Panel:
    return statetimeline.Panel().legend(_legend()).merge_values(merge_values=True)


_BY_KIND: dict[Kind, Callable[[Panel], AnyPanel]] = {
    "lines": _lines,
    "stacked": _stacked,
    "stat": _stat,
    "timeline": _timeline,
}


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(show_legend=True).placement(look.LegendPlacement.BOTTOM)
    return legend.display_mode(look.LegendDisplayMode.LIST)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False)


def _to_the_others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("kv-router").type(grid.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.keep_time(keep_time=True).include_vars(include_vars=True)


def _variable(label: str, metric: str) -> dashboard.QueryVariable:
    values = f"label_values(kvrouter_{metric}, {label})"
    built = dashboard.QueryVariable(label).label(label).datasource(_DATASOURCE).definition(values)
    built.query({"qryType": 1, "query": values, "refId": "Variable"})
    built.refresh(grid.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(grid.VariableSort.NATURAL_ASC)
    everything = grid.VariableOption(selected=True, text=["All"], value=["$__all"])
    return built.multi(multi=True).include_all(include_all=True).all_value(".*").current(everything)


def _annotation(annotation: Annotation) -> dashboard.AnnotationQuery:
    target = Dataquery().expr(annotation.expr).ref_id("Anno").range().datasource(_DATASOURCE)
    built = dashboard.AnnotationQuery().name(annotation.name).datasource(_DATASOURCE).enable(enable=True)
    return built.icon_color(annotation.color).title_format(annotation.title).target(target)
