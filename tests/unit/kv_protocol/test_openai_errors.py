"""What was found is shown as the client wrote it: as JSON, and no more of it than fits."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kv_protocol.errors import FOUND_CHARACTERS_MAX
from kv_protocol.openai.errors import Verbatim, as_json
from kv_protocol.openai.requests import RequestInvalid, decode_chat


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


@pytest.mark.parametrize("around", ["{%s}", '{"nvext": {%s}}', '{"stream_options": {%s}}'])
def test_of_a_long_unknown_key_the_beginning_is_shown(around: str) -> None:
    key = "k" * 1_000_000
    with pytest.raises(RequestInvalid) as refused:
        decode_chat((around % f'"{key}": 1').encode())
    assert f"{'k' * FOUND_CHARACTERS_MAX}..." in refused.value.field
    assert len(str(refused.value)) < 300
    assert len(refused.value.field) < 100


@pytest.mark.parametrize(
    ("body", "field", "shown"),
    [
        (b'{"model": null, "messages": [{}]}', "model", "found null,"),
        (b'{"model": "m", "messages": [{}, true]}', "messages[1]", "found true,"),
        (b'{"model": "m", "messages": [{}], "stop": [1]}', "stop[0]", "found 1,"),
        (b'{"model": "m", "messages": [{}], "tools": {"a":  1}}', "tools", 'found {"a":  1},'),
        (b'{"model": "m", "messages": [{}], "n": "' + b"x" * 500 + b'"}', "n", 'found "' + "x" * 79 + "...,"),
        (b'{"model": "\xff", "messages": [{}]}', "body", "found byte 0xff at 11,"),
    ],
)
def test_what_msgspec_found_is_shown_as_it_was_sent(body: bytes, field: str, shown: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        decode_chat(body)
    assert refused.value.field == field
    assert shown in str(refused.value)
