"""The pages in `docs/reference/` are what the code says now."""

import pytest

from kv_runtime.config_text import settings_of
from tests.support.reference import COMMANDS, FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_has_a_meaning(command: str) -> None:
    assert [each.path for each in settings_of(COMMANDS[command]) if not each.meaning] == []
