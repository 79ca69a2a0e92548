"""Reference pages that are made from the code: `python -m tests.support.reference` writes them.

A test compares what stands in `docs/reference/` with what would be written.
"""

from collections.abc import Iterator

from pydantic import BaseModel

from indexer.config import IndexerSettings
from kv_runtime.config.rendering import Setting, settings_of
from router.config import RouterSettings
from router.doctor.catalogue import CATALOGUE
from tests.support.metrics_page import metrics_page
from tests.support.paths import ROOT
from worker_agent.attached.config import AttachSettings
from worker_agent.config import AgentSettings

FOLDER = ROOT / "docs" / "reference"
COMMANDS: dict[str, type[BaseModel]] = {
    "router": RouterSettings,
    "indexer serve": IndexerSettings,
    "worker-agent serve": AgentSettings,
    "worker-agent attach": AttachSettings,
}


def settings_page() -> str:
    """Return the page of all settings of all commands, as Markdown."""
    return "\n".join(_settings()) + "\n"


def _settings() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Made from the code by `make reference`. A flag beats the environment (`KVROUTER_SECTION__KEY`), which beats"
    yield "YAML (`--config`), which beats the default; `--set section.key=value` sets any. `--print-config --explain`"
    yield "prints the effective values with these texts, those that differ from their defaults first."
    commands: dict[Setting, list[str]] = {}
    for command, kind in COMMANDS.items():
        for each in settings_of(kind):
            commands.setdefault(each, []).append(f"`{command}`")
    for those in dict.fromkeys(tuple(each) for each in commands.values()):
        yield f"\n## {', '.join(those)}\n"
        yield "| setting | allowed | default | meaning |"
        yield "|---|---|---|---|"
        for each in (each for each, own in commands.items() if tuple(own) == those):
            yield f"| `{each.path}` | {_cell(each.allowed)} | `{_cell(each.default)}` | {_cell(each.meaning)} |"


def findings_page() -> str:
    """Return the page of all findings of `router doctor`, as Markdown."""
    rows = [
        f"| `{check}` | {each.severity} | {_cell(each.why)} | {_cell(each.fix)} |" for check, each in CATALOGUE.items()
    ]
    return "\n".join(
        [
            "# Findings of the doctor",
            "",
            "Made from the code by `make reference`. An id never changes its meaning ([DOCTOR](../DOCTOR.md)).",
            "",
            "| finding | severity | why it matters | what to do |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {
    "doctor.md": findings_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
