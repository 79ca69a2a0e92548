"""Reference pages that are made from the code: `python -m tests.support.reference` writes them.

A test compares what stands in `docs/reference/` with what would be written.
"""

from collections.abc import Iterator
from inspect import cleandoc
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, SecretStr

from indexer.config import IndexerSettings
from kv_runtime.config.rendering import allowed_in, section_of
from router.config import RouterSettings
from router.doctor.facts import CATALOGUE
from tests.support.metrics_page import metrics_page
from tests.support.options_page import options_page
from tests.support.paths import ROOT
from worker_agent.attached.config import AttachSettings
from worker_agent.config import AgentSettings
from worker_agent.engines.servers import SERVERS

FOLDER = ROOT / "docs" / "reference"
COMMANDS: dict[str, type[BaseModel]] = {
    "router": RouterSettings,
    "indexer serve": IndexerSettings,
    "worker-agent serve": AgentSettings,
    "worker-agent attach": AttachSettings,
}


class Setting(NamedTuple):
    """One setting: its path, its type and range in words, its default as YAML, its meaning with its unit."""

    path: str
    allowed: str
    default: str
    meaning: str


def settings_of(kind: type[BaseModel], above: str = "", given: BaseModel | None = None) -> Iterator[Setting]:
    """Yield all settings of a tree, section by section; a section in a list has `[]` in its path.

    `given`: the default of the section, where the tree has one that differs from the section's own.
    """
    for name, field in kind.model_fields.items():
        path, section, item = f"{above}{name}", section_of(field.annotation), _section_of_list(field.annotation)
        default = field.get_default(call_default_factory=True) if given is None else getattr(given, name)
        if section:
            yield from settings_of(section, f"{path}.", default if isinstance(default, BaseModel) else None)
        elif item:
            yield from settings_of(item, f"{path}[].")
        else:
            is_required = given is None and field.is_required()
            shown = "required" if is_required else _as_yaml(_plain(default))
            yield Setting(path, allowed_in(field), shown, field.description or "")


def _section_of_list(kind: Any) -> type[BaseModel] | None:
    return next((section for each in get_args(kind) if (section := section_of(each))), None)


def _plain(value: Any) -> Any:
    """Convert a default for YAML."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return list(value) if isinstance(value, tuple) else value


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()


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


def engines_page() -> str:
    """Return the page of the engines that can be attached, as Markdown: their classes' facts and docstrings."""
    rows = [
        f"| `{each.name}` | `{each.owned_by}` | `{each.events}` | {_code(each.event_flag)} | {each.block_size} "
        f"| `{each.metrics.prefix}*` | {_code(each.rank_header)} | {'yes' if each.stream_format else 'no'} |"
        for each in SERVERS.values()
    ]
    notes = [f"\n## {name}\n\n{cleandoc(each.__doc__ or '')}" for name, each in SERVERS.items()]
    head = (
        "| `engine.kind` | `owned_by` of `/v1/models` | KV events, unless it states where | flag that gives events "
        "| tokens of a block, by default | metrics | header that names the rank | its streams resume |"
    )
    made = "Made from the code by `make reference` ([ATTACH](../ATTACH.md))."
    return "\n".join(["# Engines that can be attached", "", made, "", head, "|" + "---|" * 8, *rows, *notes, ""])


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {
    "doctor.md": findings_page,
    "engines.md": engines_page,
    "metrics.md": metrics_page,
    "options.md": options_page,
    "settings.md": settings_page,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
