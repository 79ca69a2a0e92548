"""No setting is without effect: the product reads each one. Unused arguments of commands are the linter's to find."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from indexer.config import IndexerSettings
from router.config import RouterSettings
from worker_agent.config import AgentSettings

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "indexer", "worker_agent", "kv_runtime", "kv_protocol")
READ = frozenset(
    name
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    for name in re.findall(r"\.(\w+)\b", path.read_text())
)
"""Names that stand behind a dot anywhere."""


def unread(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the settings below `section` of which no name is read."""
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for each in below:
            yield from unread(each, f"{path}{name}.")
        if not below and name not in READ:
            yield path + name


def test_every_setting_is_read() -> None:
    assert [each for root in (RouterSettings, AgentSettings, IndexerSettings) for each in unread(root)] == []


def test_a_setting_that_nothing_reads_is_found() -> None:
    class Section(BaseModel):
        port: int = 0
        nobody_reads_this_setting: int = 0

    class Settings(BaseModel):
        section: Section = Section()

    assert list(unread(Settings)) == ["section.nobody_reads_this_setting"]
