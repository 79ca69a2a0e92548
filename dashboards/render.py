"""Content to the JSON that Grafana loads: ids by place, refIds by order, so that the same content is the same bytes.

The builders of the SDK set neither a panel's id nor a query's refId, and Grafana needs both: alerts, links and the
order of a panel's queries go by them.
"""

import json
from collections.abc import Callable, Iterator

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, stat, statetimeline, text, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as look
from grafana_foundation_sdk.models import dashboard as grid
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

from dashboards.links import ROUTER, ROUTER_DEFAULT
from dashboards.panels import WIDTH, Annotation, Board, Kind, Panel, Query, Variable

TAG = "kv-router"
_DATASOURCE = look.DataSourceRef(type_val="prometheus", uid="${datasource}")
_REF_IDS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROW_HEIGHT, _QUESTIONS_HEIGHT = 1, 3
_GOOD, _BAD = "green", "red"

AnyPanel = text.Panel | timeseries.Panel | heatmap.Panel | stat.Panel | bargauge.Panel | statetimeline.Panel


def rendered(board: Board, variables: tuple[Variable, ...], annotations: tuple[Annotation, ...]) -> bytes:
    """Return a dashboard's JSON; the same content gives the same bytes."""
    built = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags([TAG])
    built.time("now-1h", "now").refresh("10s").timezone("browser").tooltip(grid.DashboardCursorSync.CROSSHAIR)
    built.editable()
    built.link(_to_the_others())
    built.with_variable(dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"))
    for variable in variables:
        built.with_variable(_variable(variable))
    built.with_variable(dashboard.TextBoxVariable(ROUTER).label("router page").default_value(ROUTER_DEFAULT))
    for annotation in annotations:
        built.annotation(_annotation(annotation))
    for each in _placed(board):
        if isinstance(each, dashboard.Row):
            built.with_row(each)
        else:
            built.with_panel(each)
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True).encode() + b"\n"


def _questions(board: Board) -> text.Panel:
    """Return the panel at the top: what the dashboard answers, in the order of its rows."""
    questions = " ".join(f"**{row.question}**" for row in board.rows)
    built = text.Panel().title("What this dashboard answers").transparent(transparent=True)
    return built.mode(TextMode.MARKDOWN).content(questions)


def _placed(board: Board) -> Iterator[dashboard.Row | AnyPanel]:
    """Yield rows and panels in their order, each with its id and its place; a row's widths fill lines from the left."""
    top, panel_id = _QUESTIONS_HEIGHT, 1
    yield _questions(board).id(panel_id).grid_pos(grid.GridPos(h=top, w=WIDTH, x=0, y=0))
    for row in board.rows:
        panel_id += 1
        here = grid.GridPos(h=_ROW_HEIGHT, w=WIDTH, x=0, y=top)
        yield dashboard.Row(row.question).id(panel_id).grid_pos(here)
        top, left, line_height = top + _ROW_HEIGHT, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, line_height = top + line_height, 0, 0
            panel_id += 1
            here = grid.GridPos(h=panel.height, w=panel.width, x=left, y=top)
            yield _panel(panel).id(panel_id).grid_pos(here)
            left, line_height = left + panel.width, max(line_height, panel.height)
        top += line_height


def _panel(panel: Panel) -> AnyPanel:
    built = _BY_KIND[panel.kind](panel)
    built.title(panel.title).description(panel.description).unit(panel.unit).datasource(_DATASOURCE)
    if panel.bad_from is not None:
        steps = [grid.Threshold(value=None, color=_GOOD), grid.Threshold(value=panel.bad_from, color=_BAD)]
        built.thresholds(dashboard.ThresholdsConfig().mode(grid.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.links:
        built.data_links([dashboard.DashboardLink(each.title).url(each.url) for each in panel.links])
    for ref_id, query in zip(_REF_IDS, panel.queries, strict=False):
        built.with_target(_target(query, ref_id, panel.kind))
    return built


def _target(query: Query, ref_id: str, kind: Kind) -> Dataquery:
    target = Dataquery().expr(query.expr).ref_id(ref_id).legend_format(query.legend).datasource(_DATASOURCE)
    if query.exemplars:
        target = target.exemplar(exemplar=True)
    if kind == "heatmap":
        return target.range().format(PromQueryFormat.HEATMAP)
    return target.instant() if kind == "bars" else target.range()


def _lines(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().line_width(1).fill_opacity(8).show_points(look.VisibilityMode.NEVER).legend(_legend())
    for ref_id, query in zip(_REF_IDS, panel.queries, strict=False):
        if query.right:
            at_the_right = grid.DynamicConfigValue(id_val="custom.axisPlacement", value="right")
            built.override_by_query(ref_id, [at_the_right])
    if panel.bad_from is not None:
        built.thresholds_style(common.GraphThresholdsStyleConfig().mode(look.GraphThresholdsStyleMode.DASHED))
    return built


def _stacked(panel: Panel) -> timeseries.Panel:
    return _lines(panel).fill_opacity(60).stacking(common.StackingConfig().mode(look.StackingMode.NORMAL).group("A"))


def _heatmap(panel: Panel) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    axis = heatmap.YAxisConfig().unit(panel.unit)
    return heatmap.Panel().calculate(calculate=False).color(color).y_axis(axis).show_legend()


def _stat(_: Panel) -> stat.Panel:
    return stat.Panel().reduce_options(_last()).graph_mode(look.BigValueGraphMode.AREA)


def _bars(_: Panel) -> bargauge.Panel:
    return bargauge.Panel().reduce_options(_last()).orientation(look.VizOrientation.HORIZONTAL)


def _timeline(_: Panel) -> statetimeline.Panel:
    return statetimeline.Panel().legend(_legend()).merge_values(merge_values=True)


_BY_KIND: dict[Kind, Callable[[Panel], AnyPanel]] = {
    "lines": _lines,
    "stacked": _stacked,
    "heatmap": _heatmap,
    "stat": _stat,
    "bars": _bars,
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


def _variable(variable: Variable) -> dashboard.QueryVariable:
    values = f"label_values(kvrouter_{variable.metric}, {variable.label})"
    built = dashboard.QueryVariable(variable.name).label(variable.name).datasource(_DATASOURCE).definition(values)
    built.query({"qryType": 1, "query": values, "refId": "Variable"})
    built.refresh(grid.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(grid.VariableSort.NATURAL_ASC)
    everything = grid.VariableOption(selected=True, text=["All"], value=["$__all"])
    return built.multi(multi=True).include_all(include_all=True).all_value(".*").current(everything)


def _annotation(annotation: Annotation) -> dashboard.AnnotationQuery:
    target = Dataquery().expr(annotation.expr).ref_id("Anno").range().datasource(_DATASOURCE)
    built = dashboard.AnnotationQuery().name(annotation.name).datasource(_DATASOURCE).enable(enable=True)
    return built.icon_color(annotation.color).title_format(annotation.title).target(target)
