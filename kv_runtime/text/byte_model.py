"""The built-in model "byte", for simulated workers and tests: a token is a UTF-8 byte or a mark of the template.

Ids 0..255 are UTF-8 bytes; the ids above belong to the template, and a user's text cannot produce them. A chat is
rendered message by message. So the tokens of messages[:k] are a prefix of those of messages; a prompt and the UTF-8 of
its answer are a prefix of the next turn's prompt. Documents and template variables are ignored.

The template is a chat as pieces, each a mark and the text after it, and as packed token ids:

[<|tools|> json <|end|>]  { <|role|> content [<|calls|> json] <|end|> }  [<|assistant|>]
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import Unpack

from kv_runtime.text.chat_messages import TextError, checked_unicode, digest_of, prepared_messages
from kv_runtime.text.chat_template import (
    ChatOptions,
    Message,
)
from kv_runtime.text.model import Detokenizer, Text

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
"""For each special token, the character whose code point is the token's id."""


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


BYTE_MODEL = "byte"


class ByteText(Text):
    """The built-in model: a token per UTF-8 byte, and one per mark of the template."""

    tokenizer_digest = digest_of(repr((BYTE_IDS, MARKS)).encode())
    template_digest = digest_of(repr((3, MARKS, ROLE_MARKS)).encode())
    vocab_size = BYTE_IDS + len(MARKS)
    special_ids: Mapping[str, int] = {token: BYTE_IDS + at for at, token in enumerate(MARKS)}
    eos_ids = frozenset({special_ids[END]})

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:  # noqa: ARG002 - there are none
        """Return the bytes of the text; there are no tokens around them."""
        return packed_bytes(checked_unicode("prompt", text))

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return a chat's pieces: a mark's id, then the bytes of a text."""
        return packed(pieces(messages, options))

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the pieces by name; marks in a user's text look the same."""
        return "".join(mark + text for mark, text in pieces(messages, options))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of those ids that are bytes."""
        return _bytes_of(ids).decode(errors="replace")

    def _detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the byte, or a mark's name."""
        if token_id < BYTE_IDS:
            return bytes((token_id,))
        at = token_id - BYTE_IDS
        return MARKS[at].encode() if at < len(MARKS) else None


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(_bytes_of(ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _bytes_of(ids: Iterable[int]) -> bytes:
    return bytes(token for token in ids if token < BYTE_IDS)
