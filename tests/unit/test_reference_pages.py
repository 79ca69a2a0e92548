"""The pages in `docs/reference/` are what the code says now."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.metric_families import COMMANDS as METRICS
from tests.support.paths import ROOT
from tests.support.reference import COMMANDS, FOLDER, PAGES, settings_of

DOCUMENTS = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
MAKERS = {"counter", "gauge", "histogram", "summary", "Histogram"}


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_has_a_meaning(command: str) -> None:
    assert [each.path for each in settings_of(COMMANDS[command]) if not each.meaning] == []


def makes_families(path: Path) -> bool:
    """Return whether a function of the module calls a maker of metric families."""
    text = path.read_text()
    if not any(f"{each}(" in text for each in MAKERS):
        return False
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in MAKERS for called in calls)


def test_every_module_that_makes_metrics_is_on_the_page() -> None:
    packages = ("kv_runtime", "indexer", "router", "worker_agent")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py") if makes_families(path)]
    listed = {family.module for families in METRICS.values() for family in families.values()}
    assert listed == {str(path.relative_to(ROOT)) for path in modules}


def test_every_metric_is_on_the_page_once() -> None:
    rows = re.findall(r"^\| `(kvrouter_\w+)[`{]", PAGES["metrics.md"](), re.MULTILINE)
    assert sorted(rows) == sorted({name for families in METRICS.values() for name in families})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_metric_that_a_document_names_exists(document: Path) -> None:
    named = set(re.findall(r"kvrouter_[a-z_]+", document.read_text()))
    assert named - {name for families in METRICS.values() for name in families} == set()
