"""The chat template of the model "byte": a chat as pieces, each a mark and the text after it, and as packed token ids.

[<|tools|> json <|end|>]  { <|role|> content [<|calls|> json] <|end|> }  [<|assistant|>]
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kv_runtime.text.chat_messages import TextError, checked_unicode, prepared_messages

BYTE_IDS = 256
"""Ids below are UTF-8 bytes; those from here on are marks."""
ROLE_MARKS = {
    "system": "<|system|>",
    "developer": "<|system|>",  # OpenAI's newer name
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|tool|>",
}
END, TOOLS, CALLS = "<|end|>", "<|tools|>", "<|calls|>"
MARKS = (*dict.fromkeys(ROLE_MARKS.values()), END, TOOLS, CALLS)
_MARK_CHARACTERS = {mark: chr(BYTE_IDS + at) for at, mark in enumerate(MARKS)}
"""By mark, the character whose code point is the mark's id."""


def pieces(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a mark and the text after it; raise `TextError`."""
    tools, continues = options.get("tools"), options.get("continue_final_message", False)
    found = [(TOOLS, _json("tools", tools)), (END, "")] if tools else []
    for index, message in enumerate(prepared_messages(messages)):
        content, mark = message["content"], ROLE_MARKS.get(message["role"])
        if mark is None:
            raise TextError(f"messages[{index}].role", message["role"], f"one of {', '.join(ROLE_MARKS)}")
        found.append((mark, content if content.isascii() else checked_unicode(f"messages[{index}].content", content)))
        if message.get("tool_calls"):
            found.append((CALLS, _json(f"messages[{index}].tool_calls", message["tool_calls"])))
        found.append((END, ""))
    if options.get("add_generation_prompt", not continues):
        found.append((ROLE_MARKS["assistant"], ""))
    elif continues:
        found.pop()
    return found


def packed(found: list[tuple[str, str]]) -> bytes:
    """Return the ids of the pieces, packed."""
    return "".join([_MARK_CHARACTERS[mark] + _bytes(text) for mark, text in found]).encode("utf-32-le")


def packed_bytes(text: str) -> bytes:
    """Return the bytes of the text in UTF-8 as ids, packed."""
    return _bytes(text).encode("utf-32-le")


def _bytes(text: str) -> str:
    """Return a character for each byte of the text in UTF-8: its code point is the byte."""
    return text if text.isascii() else text.encode().decode("latin-1")


def _json(field: str, value: object) -> str:
    return checked_unicode(field, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
