"""The beginnings and ends of prompts, for people who look into decisions; kept if `control.keep_text` is set.

They are only in memory: neither the journal nor the log has them. Token ids are kept; `text` and `excerpt` decode them.
Prompts with images, and those that the mode does not encode, have no ids, and are not kept. Pure.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

HEAD_TOKENS, TAIL_TOKENS = 512, 512
BYTES_MAX = 64 << 20
"""Limit of all prompts together; the oldest are dropped."""
_TOKEN_BYTES = 4
_ENTRY_BYTES = 512
"""Upper bound of an entry's size without its request id, hashes and token ids."""


class PromptText(msgspec.Struct, frozen=True):
    """A prompt's text; `omitted_tokens` between `head` and `tail` are left out. A short prompt has only a head."""

    head: str
    tail: str
    omitted_tokens: int


class _Kept(NamedTuple):
    hashes: bytes
    head: bytes
    """Empty: another prompt with the same hashes came under this id."""
    tail: bytes
    omitted_tokens: int


class KeptPrompts:
    """The newest prompt of each request id.

    Clients choose the ids, and may use one for several prompts. A prompt is shown only for decisions on that prompt:
    the decision's sequence hashes must begin with the prompt's; after a migration there are more. Prompts that differ
    only behind their last full block have the same hashes; if two of them came under one id, neither is shown.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], bytes_max: int = BYTES_MAX) -> None:
        """`decode` returns the text of token ids."""
        self._decode, self._bytes_max = decode, bytes_max
        self._kept: dict[str, _Kept] = {}
        self.size_bytes = 0
        """An upper bound of the size of all kept prompts."""

    def keep(self, request_id: str, ids: bytes, hashes: bytes) -> None:
        """Keep the beginning and the end of a prompt: token ids as little-endian u32s, packed sequence hashes."""
        if not ids:
            return
        head, rest = ids[: HEAD_TOKENS * _TOKEN_BYTES], ids[HEAD_TOKENS * _TOKEN_BYTES :]
        tail = rest[-TAIL_TOKENS * _TOKEN_BYTES :]
        before = self._drop(request_id)
        omitted_tokens = (len(rest) - len(tail)) // _TOKEN_BYTES
        if before is not None and before.hashes == hashes and before[1:3] != (head, tail):
            head = tail = b""
        kept = self._kept[request_id] = _Kept(hashes, head, tail, omitted_tokens)
        self.size_bytes += _size(request_id, kept)
        while self.size_bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def text(self, request_id: str, hashes: bytes) -> PromptText | None:
        """Return the text of a decision's prompt, by the decision's hashes; None if it is not kept."""
        kept = self._of(request_id, hashes)
        if kept is None:
            return None
        return PromptText(self._text_of(kept.head), self._text_of(kept.tail), kept.omitted_tokens)

    def excerpt(self, request_id: str, hashes: bytes, start: int, tokens: int) -> str | None:
        """Return the text of `tokens` or fewer tokens of a prompt's kept head, from `start` on; None: none are kept."""
        kept = self._of(request_id, hashes)
        ids = b"" if kept is None else kept.head[start * _TOKEN_BYTES : (start + tokens) * _TOKEN_BYTES]
        return self._text_of(ids) if ids else None

    def _of(self, request_id: str, hashes: bytes) -> _Kept | None:
        kept = self._kept.get(request_id)
        return kept if kept is not None and kept.head and hashes.startswith(kept.hashes) else None

    def _drop(self, request_id: str) -> _Kept | None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self.size_bytes -= _size(request_id, kept)
        return kept

    def _text_of(self, ids: bytes) -> str:
        return self._decode(array("I", ids))


def _size(request_id: str, kept: _Kept) -> int:
    return len(request_id) + len(kept.hashes) + len(kept.head) + len(kept.tail) + _ENTRY_BYTES
