r"""What was found is shown as the client wrote it. `\u` escapes are whole characters, whichever parser reads a body."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kv_protocol.errors import FOUND_CHARACTERS_MAX
from kv_protocol.openai.errors import Verbatim, as_json, lone_surrogate
from kv_protocol.openai.requests import CHAT, RequestInvalid, decode_chat, decode_inbound


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


def test_what_is_long_is_cut() -> None:
    for found in (["x" * 1000] * 1000, "x" * 1000, "\\" * 1000):
        shown = as_json(found)
        assert (len(shown), shown[-3:]) == (FOUND_CHARACTERS_MAX + len("..."), "...")


READERS: dict[str, Callable[[bytes], Any]] = {"router": lambda body: decode_inbound(CHAT, body), "agent": decode_chat}
CHATTED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HALVES = ["\ud800", "\udbff", "\udc00", "a\udfff", "\ud800\ud800", "\udc00\ud800", "\ud83d\ude00\ude00", "\\\ud800"]
WHOLE = ["\U0001f600", "\ud7ff", "\ue000", "\\ud800", "\\\\ud800", "a\n\u0000", "é"]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", lambda text: text),
        ("metadata", lambda text: {"a": text}),
        ("tools", lambda text: [{"type": "function", "function": {"name": "f", "description": text}}]),
        ("messages", lambda text: [{"role": "user", "content": text}]),
        ("chat_template_kwargs", lambda text: {text: 1}),
    ],
)
def test_half_a_character_is_refused_alike_in_every_field(
    read: Callable[[bytes], Any], half: str, field: str, value: Callable[[str], Any]
) -> None:
    with pytest.raises(RequestInvalid, match=r"^body: found \\u[0-9a-f]{4} at byte \d+, allowed UTF-16 "):
        read(json.dumps(CHATTED | {field: value(half)}).encode())


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("text", WHOLE)
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_whole_characters_pass(read: Callable[[bytes], Any], text: str, ensure_ascii: bool) -> None:
    body = CHATTED | {"cache_salt": text, "metadata": {text: text}, "messages": [{"role": "user", "content": text}]}
    assert read(json.dumps(body, ensure_ascii=ensure_ascii).encode()).salt == text


@pytest.mark.parametrize("body", [b"", b'{"a":"\\', b'{"a":"\\u', b'{"a":"\\ud8', b"\\x", b'{"a":"\\uzzzz\\ud800"}'])
def test_what_is_no_json_is_left_to_the_decoder(body: bytes) -> None:
    assert lone_surrogate(body) == ""
