"""The built-in model "byte", for simulated workers and tests: a token is a UTF-8 byte or a mark of the template.

Ids 0..255 are UTF-8 bytes; the ids above belong to the template, and a user's text cannot produce them. Message by
message:

    [<|tools|> json <|end|>]  { <|role|> content [<|calls|> json] <|end|> }  [<|assistant|>]

So the tokens of messages[:k] are a prefix of those of messages; a prompt and the UTF-8 of its answer are a prefix of
the next turn's prompt. Documents and template variables are ignored.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence

from typing_extensions import Unpack

from kv_runtime.text.chat_messages import blame_characters, checked_messages, checked_unicode, digest_of
from kv_runtime.text.chat_template import (
    ChatOptions,
    Message,
)
from kv_runtime.text.model import Detokenizer, Text

BYTE_MODEL = "byte"
_BYTE_IDS = 256
_ROLE_TOKENS = {
    "system": "<|system|>",
    "developer": "<|system|>",  # OpenAI's newer name
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|tool|>",
}
_END, _TOOLS, _CALLS = "<|end|>", "<|tools|>", "<|calls|>"
_BYTE_SPECIALS = (*dict.fromkeys(_ROLE_TOKENS.values()), _END, _TOOLS, _CALLS)


class ByteText(Text):
    """The built-in model: a token per UTF-8 byte, and one per mark of the template."""

    tokenizer_digest = digest_of(repr((_BYTE_IDS, _BYTE_SPECIALS)).encode())
    template_digest = digest_of(repr((2, _BYTE_SPECIALS, _ROLE_TOKENS)).encode())
    vocab_size = _BYTE_IDS + len(_BYTE_SPECIALS)
    special_ids: Mapping[str, int] = {token: _BYTE_IDS + at for at, token in enumerate(_BYTE_SPECIALS)}
    eos_ids = frozenset({special_ids[_END]})

    def pack(self, text: str, *, add_special_tokens: bool = True) -> bytes:  # noqa: ARG002 - there are none
        """Return the bytes of the text; there are no tokens around them."""
        return _packed_bytes(checked_unicode("text", text))

    def pack_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> bytes:
        """Return the pieces in the module's docstring: a mark's id, then the bytes of a text."""
        packed: list[bytes] = []
        for mark, text in _byte_pieces(messages, options):
            packed += _PACKED_MARKS[mark], _packed_bytes(text)
        return b"".join(packed)

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the pieces by name; marks in a user's text look the same."""
        return "".join(mark + text for mark, text in _byte_pieces(messages, options))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of those ids that are bytes."""
        return _bytes_of(ids).decode(errors="replace")

    def _detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the byte, or a mark's name."""
        if token_id < _BYTE_IDS:
            return bytes((token_id,))
        at = token_id - _BYTE_IDS
        return _BYTE_SPECIALS[at].encode() if at < len(_BYTE_SPECIALS) else None


_PACKED_MARKS = {mark: special.to_bytes(4, "little") for mark, special in ByteText.special_ids.items()}


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(_bytes_of(ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _bytes_of(ids: Iterable[int]) -> bytes:
    return bytes(token for token in ids if token < _BYTE_IDS)


def _json(field: str, value: object) -> str:
    return checked_unicode(field, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _byte_pieces(messages: Sequence[Message], options: ChatOptions) -> list[tuple[str, str]]:
    """Return pairs of a mark and the text after it."""
    checked = checked_messages(messages)
    blame_characters(checked)
    tools, continues = options.get("tools"), options.get("continue_final_message", False)
    pieces = [(_TOOLS, _json("tools", tools)), (_END, "")] if tools else []
    for index, message in enumerate(checked):
        pieces.append((_ROLE_TOKENS[message["role"]], message["content"] or ""))
        if message.get("tool_calls"):
            pieces.append((_CALLS, _json(f"messages[{index}].tool_calls", message["tool_calls"])))
        pieces.append((_END, ""))
    if options.get("add_generation_prompt", not continues):
        pieces.append((_ROLE_TOKENS["assistant"], ""))
    elif continues:
        pieces.pop()
    return pieces


def _packed_bytes(text: str) -> bytes:
    """Return the bytes of the text in UTF-8 as ids, packed: the numbers of its characters, if all are ASCII."""
    return (text if text.isascii() else text.encode().decode("latin-1")).encode("utf-32-le")
