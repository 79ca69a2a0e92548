"""The pages in `docs/reference/` are what the code says now."""

import re
from pathlib import Path

import pytest

from tests.support.metric_families import COMMANDS as METRICS
from tests.support.paths import ROOT
from tests.support.reference import COMMANDS, FOLDER, PAGES, settings_of

PACKAGES = ("kv_runtime", "indexer", "router", "worker_agent")
MAKER = r"\b(?:counter|gauge|histogram|summary)\(\s*\"([a-z_]+)\""
DOCUMENTS = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_has_a_meaning(command: str) -> None:
    assert [each.path for each in settings_of(COMMANDS[command]) if not each.meaning] == []


def test_every_metric_that_a_module_makes_by_its_name_is_on_the_page() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    made = {name for path in modules for name in re.findall(MAKER, path.read_text())}
    listed = {re.sub(r"^kvrouter_|_total$", "", name) for families in METRICS.values() for name in families}
    assert len(made) > 100
    assert made - listed == set()


def test_every_metric_is_on_the_page_once() -> None:
    rows = re.findall(r"^\| `(kvrouter_\w+)[`{]", PAGES["metrics.md"](), re.MULTILINE)
    assert sorted(rows) == sorted({name for families in METRICS.values() for name in families})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_metric_that_a_document_names_exists(document: Path) -> None:
    named = set(re.findall(r"kvrouter_[a-z_]+", document.read_text()))
    assert named - {name for families in METRICS.values() for name in families} == set()
