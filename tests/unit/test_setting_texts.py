"""No text of any setting has a newline or another control character: it would begin another line of a head or a log."""

from typing import Any

import pytest
from pydantic import Field, SecretStr, ValidationError

from indexer.config import IndexerSettings
from kv_runtime.config.sections import ControlSection, Section
from router.config import DataSection, RouterSettings
from worker_agent.attached.config import AttachSettings
from worker_agent.config import AgentSettings, EngineSection

INJECTED = "a-secret-of-many-characters\r\nx-injected: 1"


def sections(kind: type[Section]) -> set[type[Section]]:
    direct = kind.__subclasses__()
    return {*direct, *(each for child in direct for each in sections(child))}


TEXTS = [
    (section, name, [INJECTED] if "tuple" in str(field.annotation) else INJECTED)
    for section in sorted(sections(Section), key=str)
    if section.__module__.split(".")[0] != "tests"
    for name, field in section.model_fields.items()
    if field.annotation in (str, SecretStr, str | None, tuple[str, ...], tuple[SecretStr, ...])
]


def errors(section: type[Section], **given: Any) -> list[Any]:
    try:
        section.model_validate(given)
    except ValidationError as error:
        return error.errors()
    return []


def test_no_text_or_secret_of_any_setting_may_have_control_characters() -> None:
    assert {RouterSettings, IndexerSettings, AgentSettings, AttachSettings} <= sections(Section)
    taken = [
        (section, name)
        for section, name, text in TEXTS
        if name not in {error["loc"][0] for error in errors(section, **{name: text})}
    ]
    assert taken == [(EngineSection, "answer")], "of the simulated engine: it is no part of a head or a log"
    assert len(TEXTS) > 60


@pytest.mark.parametrize("names", [{"a": INJECTED}, {INJECTED: "a"}, {"a": (INJECTED,)}])
def test_no_text_in_a_mapping_may_have_control_characters(names: dict[str, Any]) -> None:
    class NamesSection(Section):
        names: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)

    (error,) = errors(NamesSection, names=names)
    assert error["loc"] == ("names",)


def test_a_refused_secret_is_not_in_the_message() -> None:
    (error,) = errors(DataSection, worker_token=INJECTED)
    assert error["msg"] == "Value error, allowed text without control characters"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_one_newline_at_the_end_of_a_secret_is_left_out_as_mounted_files_have_it(end: str) -> None:
    assert ControlSection(token=SecretStr(f"secret{end}")).token.get_secret_value() == "secret"
    assert errors(ControlSection, token=f"secret{end}{end}")
