"""The records in `docs/adr/`: their form, their index, and the files that documents name."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "adr"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
DOCUMENTS = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"})
SECTIONS = ["Status", "Context", "Decision", "Alternatives", "Consequences"]
FOLDERS = "bench|configs|containers|dashboards|docs|indexer|kv_protocol|kv_runtime|router|tests|worker_agent"
NOT_HERE = {
    "docs/format.md": "of openai/harmony",
    "docs/source/features/kvcache.md": "of TensorRT-LLM",
    "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py": "of vLLM",
    "kv_runtime/tools": "a folder of a wheel",
}
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_sections_in_order(record: Path) -> None:
    found = re.findall(r"^\*\*(\w+)\.?\*\*(?=[:\s])", record.read_text(), re.MULTILINE)
    assert [each for each in found if each in SECTIONS] == SECTIONS


def test_the_index_lists_every_record_with_its_title_and_status() -> None:
    listed = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((.+)\) \| ([\w ]+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    expected = []
    for record in RECORDS:
        text = record.read_text()
        number, title = re.findall(r"^# (\d+)\. (.+)$", text, re.MULTILINE)[0]
        expected.append((number, title, record.name, re.findall(r"^\*\*Status\*\*: ([\w ]+)", text, re.MULTILINE)[0]))
    assert listed == expected


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    named = {path.rstrip("/") for path in PATH.findall(document.read_text())}
    assert {path for path in named if not (ROOT / path).exists()} - NOT_HERE.keys() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_document_lead_to_files_and_headings(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
        file = document.parent / target if target else document
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


def anchors(file: Path) -> set[str]:
    """Return the anchors of a document: of its headings, and those that it names itself."""
    text = file.read_text()
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([^"]+)"', text))
