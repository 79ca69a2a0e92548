"""The dashboards are what their content says, can be asked, and leave out nothing that our processes count."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from click.testing import CliRunner

from dashboards.boards import CONTENT, WIDTH, rendered
from dashboards.command import dashboards
from tests.support.paths import ROOT
from tests.system.dashboards.shipped import (
    BOARD_NAMES,
    annotation_queries,
    board,
    check_names,
    every_sample,
    panel_queries,
    panels,
    selectors,
    variables,
)
from worker_agent.engines.servers import SERVERS

METRIC = rf"(?:{'|'.join(['kvrouter_', *(server.metrics.prefix for server in SERVERS.values())])})[a-z_]+"


def metric_names(expr: str) -> set[str]:
    names = {selector.name for selector in selectors(expr)}
    assert None not in names, f"a selector without a metric: {expr}"
    return {str(name) for name in names}


def family_of(sample: str) -> str:
    return re.sub(r"_(total|bucket|sum|count)$", "", sample)


def test_what_is_committed_is_what_is_made() -> None:
    committed = {path.stem: path.read_bytes() for path in (ROOT / "dashboards" / "grafana").iterdir()}
    made = {name: rendered(board) for name, board in CONTENT.boards.items()}
    assert committed == made, "run: python -m dashboards"


def test_a_query_that_is_named_beside_the_queries_is_one_of_them() -> None:
    every = [panel for board in CONTENT.boards.values() for row in board.rows for panel in row.panels]
    assert [panel.title for panel in every if not {*panel.right, *panel.exemplars} <= panel.queries.keys()] == []


def test_what_is_written_elsewhere_is_what_is_committed(tmp_path: Path) -> None:
    folder = ROOT / "dashboards"
    result = CliRunner().invoke(dashboards, ["--write", str(tmp_path)])
    written = {str(Path(each).relative_to(tmp_path)): Path(each).read_bytes() for each in result.output.split()}
    committed = [path for glob in ("grafana/*", "provisioning/*/*", "prometheus/*") for path in folder.glob(glob)]
    assert written == {str(path.relative_to(folder)): path.read_bytes() for path in committed}
    assert len(written) == len(BOARD_NAMES) + 3


def data_sources(node: Any) -> list[Any]:
    if isinstance(node, dict):
        own = [node["datasource"]] if "datasource" in node else []
        return own + [found for value in node.values() for found in data_sources(value)]
    return [found for each in node for found in data_sources(each)] if isinstance(node, list) else []


def test_every_panel_has_an_id_and_a_place_of_its_own_and_asks_the_data_source_that_the_reader_chose() -> None:
    for name in BOARD_NAMES:
        every = board(name)["panels"]
        assert sorted(panel["id"] for panel in every) == list(range(1, len(every) + 1)), name
        taken: set[tuple[int, int]] = set()
        for at in (panel["gridPos"] for panel in every):
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, (name, at)
            assert at["x"] + at["w"] <= WIDTH, (name, at)
            taken |= cells
        for panel in panels(name):
            ref_ids = [target["refId"] for target in panel["targets"]]
            assert all(ref_ids), panel["title"]
            assert len(set(ref_ids)) == len(ref_ids), panel["title"]
        found = data_sources(board(name))
        assert len(found) > len(panels(name)), name
        assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in found), name


def data_links(name: str) -> list[tuple[str, str]]:
    """Return where the panels of a dashboard lead."""
    each = [panel.get("fieldConfig", {}).get("defaults", {}) for panel in panels(name)]
    return [(link["title"], link["url"]) for defaults in each for link in defaults.get("links") or []]


@pytest.mark.parametrize("name", BOARD_NAMES)
def test_a_data_link_leads_to_the_router_another_dashboard_or_the_provisioned_tempo(name: str) -> None:
    sources = yaml.safe_load((ROOT / "dashboards" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    (tempo,) = [each["uid"] for each in sources["datasources"] if each["type"] == "tempo"]
    boards = {f"/d/{board(each)['uid']}?${{__url_time_range}}" for each in BOARD_NAMES}
    for _, url in data_links(name):
        if url.startswith("${router}/ui/") or url in boards:
            continue
        address, panes = url.split("?schemaVersion=1&panes=")
        (pane,) = json.loads(unquote(panes)).values()
        assert (address, pane["datasource"], pane["queries"][0]["datasource"]["uid"]) == ("/explore", tempo, tempo)
        assert pane["range"] == {"from": "${__from}", "to": "${__to}"}
        assert re.fullmatch(r"\{ .* \}", pane["queries"][0]["query"])


def test_every_query_is_promql_over_metrics_and_labels_that_a_process_shows() -> None:
    for shown in (*panel_queries(), *annotation_queries()):
        check_names(shown.expr, shown)


def test_variables_ask_for_labels_that_there_are() -> None:
    samples = every_sample()
    assert variables()
    for variable in variables():
        assert variable.label in samples[variable.metric]


@pytest.mark.parametrize("name", BOARD_NAMES)
def test_descriptions_name_every_metric_of_their_panel_and_no_other(name: str) -> None:
    for panel in panels(name):
        shown = {family_of(metric) for target in panel["targets"] for metric in metric_names(target["expr"])}
        named = {family_of(metric) for metric in re.findall(METRIC, panel["description"])}
        assert shown <= named, panel["title"]
        assert {family_of(metric) for metric in named} <= {family_of(each) for each in every_sample()}
        assert len(panel["description"]) > 80, f"{panel['title']}: says what to do"


@pytest.mark.parametrize("name", BOARD_NAMES)
def test_legends_name_labels_that_the_query_keeps(name: str) -> None:
    for panel in panels(name):
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
                assert any(label in each.split(", ") for each in kept), f"{panel['title']}: {label}"


def test_trust_has_the_colours_of_the_web_page_wherever_it_is_shown() -> None:
    shown = [panel for name in BOARD_NAMES for panel in panels(name) if "{{trust}}" in json.dumps(panel["targets"])]
    assert len(shown) == 2
    for panel in shown:
        colors = {
            each["matcher"]["options"]: each["properties"][0]["value"]["fixedColor"]
            for each in panel["fieldConfig"]["overrides"]
        }
        assert colors == {"/EXACT$/": "green", "/DEGRADED$/": "orange", "/FALLBACK$/": "purple"}
