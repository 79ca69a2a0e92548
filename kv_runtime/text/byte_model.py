"""The built-in model "byte", for simulated workers and tests: a token is a UTF-8 byte or a mark of the template.

Ids 0..255 are UTF-8 bytes; the ids above belong to the template (`byte_chat.py`), and a user's text cannot produce
them. A chat is rendered message by message. So the tokens of messages[:k] are a prefix of those of messages; a prompt
and the UTF-8 of its answer are a prefix of the next turn's prompt. Documents and template variables are ignored.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence

from typing_extensions import Unpack

from kv_runtime.text.byte_chat import BYTE_IDS, END, MARKS, ROLE_MARKS, packed, packed_bytes, pieces
from kv_runtime.text.chat_messages import checked_unicode, digest_of
from kv_runtime.text.chat_template import (
    ChatOptions,
    Message,
)
from kv_runtime.text.model import Detokenizer, Text

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
        """Return the pieces of `byte_chat.py`: a mark's id, then the bytes of a text."""
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
