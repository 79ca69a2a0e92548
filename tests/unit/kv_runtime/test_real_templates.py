"""Chats rendered with the templates of real models equal what transformers renders of them (`tests/golden/`)."""

import json
from datetime import datetime
from typing import Any

import pytest

from kv_runtime.text.chat_messages import digest_of
from kv_runtime.text.chat_template import ChatTemplate, TextError
from tests.support.paths import CHAT_TEMPLATES, RECORDINGS

GOLDEN = json.loads((RECORDINGS / "renderings.json").read_text())
DAY = datetime.fromisoformat(GOLDEN["day"])
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}
OPTIONS = {"tools": "tools", "kwargs": "template_kwargs", "effort": "reasoning_effort"}

needs_templates = pytest.mark.skipif(not CHAT_TEMPLATES.is_dir(), reason=f"{CHAT_TEMPLATES} is absent")


def rendered(template: ChatTemplate, chat: dict[str, Any]) -> str:
    """Return the digest of the chat as text; empty where the template refuses it."""
    options: Any = {OPTIONS[key]: chat[key] for key in OPTIONS if chat.get(key)}
    try:
        return digest_of(template.render(chat["messages"], **options).encode())[:12]
    except TextError:
        return ""


@needs_templates
@pytest.mark.parametrize("name", GOLDEN["digests"])
def test_every_chat_is_rendered_as_transformers_does(name: str) -> None:
    chats = json.loads((CHAT_TEMPLATES / "chats.json").read_text())
    template = ChatTemplate({"default": (CHAT_TEMPLATES / name).read_text()}, SPECIAL, today=lambda: DAY)
    expected = dict(zip(GOLDEN["chats"], GOLDEN["digests"][name], strict=True))
    assert {chat: rendered(template, chats[chat]) for chat in chats} == expected


def test_the_reference_has_renderings_and_refusals() -> None:
    digests = [digest for row in GOLDEN["digests"].values() for digest in row]
    assert (len(GOLDEN["digests"]), len(digests)) == (48, 1488)
    assert 0 < digests.count("") < len(digests) / 4
