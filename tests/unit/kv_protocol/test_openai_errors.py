"""What was found is shown as the client wrote it: as JSON, and no more of it than fits."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kv_protocol.errors import FOUND_CHARACTERS_MAX
from kv_protocol.openai.errors import Verbatim, as_json
from kv_protocol.openai.requests import RequestInvalid


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (None, "null"), (True, "true"), (False, "false"), (1, "1"), (1.5, "1.5"), ("text", '"text"'), ("é\n", '"é\\n"'),
        ("\ud800", '"\\ud800"'), ([1, None], "[1, null]"), ((1,), "[1]"), ({"a": {"b": []}}, '{"a": {"b": []}}'),
        (Verbatim("2 prompts"), "2 prompts"), (b"x", '"b\'x\'"'),
    ],
)  # fmt: skip
def test_a_value_is_shown_as_json(found: Any, shown: str) -> None:
    assert as_json(found) == shown
    assert str(RequestInvalid("f", found, "x")) == f"f: found {shown}, allowed x"


class Endless(Mapping[str, int]):
    """An object that never ends."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, key: str) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        return map(str, range(1 << 30))


@pytest.mark.parametrize("found", [Endless(), ["x" * 1000] * 1000, "x" * 1000, "\\" * 1000])
def test_what_is_long_is_cut_and_what_is_cut_off_is_not_looked_at(found: Any) -> None:
    shown = as_json(found)
    assert len(shown) == FOUND_CHARACTERS_MAX + len("...")
    assert shown.endswith("...")
