"""The built-in model "byte", for simulated workers and tests: a token is a UTF-8 byte or a mark of the template.

Ids 0..255 are UTF-8 bytes; the ids above belong to the template, and a user's text cannot produce them. A chat is
rendered message by message. So the tokens of messages[:k] are a prefix of those of messages; a prompt and the UTF-8 of
its answer are a prefix of the next turn's prompt. Documents and template variables are ignored.

The template writes a chat as pieces, each of a mark and the text after it:

[<|tools|> json <|end|>]  { <|role|> content [<|calls|> json] <|end|> }  [<|assistant|>]
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence

from typing_extensions import Unpack

from kv_runtime.text.chat_messages import Message, TextError, checked_unicode, digest_of, prepared_messages
from kv_runtime.text.chat_template import ChatOptions
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
MARKS = (*dict.fromkeys(ROLE_MARKS.values()), "<|end|>", "<|tools|>", "<|calls|>")
# Marks, and bytes of text, are characters here: a character's code point is the token's id.
MARK_OF_ROLE = {role: chr(BYTE_IDS + MARKS.index(mark)) for role, mark in ROLE_MARKS.items()}
END, _TOOLS, _CALLS = (chr(BYTE_IDS + MARKS.index(mark)) for mark in ("<|end|>", "<|tools|>", "<|calls|>"))


def _bytes(field: str, text: str) -> str:
    """Return a character for each byte of the text in UTF-8; raise `TextError`."""
    return checked_unicode(field, text).encode().decode("latin-1")


def _json(field: str, value: object) -> str:
    return _bytes(field, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


BYTE_MODEL = "byte"


class ByteText(Text):
    """The built-in model: a token per UTF-8 byte, and one per mark of the template."""

    tokenizer_digest = digest_of(repr((BYTE_IDS, MARKS)).encode())
    template_digest = digest_of(repr((3, MARKS, ROLE_MARKS)).encode())
    vocab_size = BYTE_IDS + len(MARKS)
    special_ids: Mapping[str, int] = {token: BYTE_IDS + at for at, token in enumerate(MARKS)}
    eos_ids = frozenset({special_ids["<|end|>"]})

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:  # noqa: ARG002 - there are none
        """Return a token for each byte of the text, without special tokens around them."""
        return _bytes("prompt", text).encode("utf-32-le")

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the chat's tokens: for each piece the mark's id, then the bytes of the text."""
        return "".join(self.chat_pieces(messages, **options)).encode("utf-32-le")

    def chat_pieces(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> tuple[str, ...]:
        """Return the pieces of a chat as strings: the code points of their characters are the ids.

        A message of a role and a text becomes the role's mark (`MARK_OF_ROLE`), the text, and `END`.
        """
        tools, continues = options.get("tools"), options.get("continue_final_message", False)
        found = [_TOOLS, _json("tools", tools), END] if tools else []
        for index, message in enumerate(prepared_messages(messages)):
            content, mark = message["content"], MARK_OF_ROLE.get(message["role"])
            if mark is None:
                raise TextError(f"messages[{index}].role", message["role"], f"one of {', '.join(ROLE_MARKS)}")
            found += (mark, content if content.isascii() else _bytes(f"messages[{index}].content", content))
            if message.get("tool_calls"):
                found += (_CALLS, _json(f"messages[{index}].tool_calls", message["tool_calls"]))
            found.append(END)
        if options.get("add_generation_prompt", not continues):
            found.append(MARK_OF_ROLE["assistant"])
        elif continues:
            del found[-1:]
        return tuple(found)

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the chat with each mark by its name. The same name in a user's text is not a mark."""
        names = {chr(BYTE_IDS + at): name for at, name in enumerate(MARKS)}
        pieces = self.chat_pieces(messages, **options)
        return "".join([names.get(each) or each.encode("latin-1").decode() for each in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of those ids that are bytes."""
        return _bytes_of(ids).decode(errors="replace")

    def _detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the byte, or a mark's name; None for other ids."""
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
