"""The beginnings and ends of prompts, for people who look into decisions; kept where `control.keep_text` is set.

They are in memory alone: neither the journal nor the log has them. Token ids are kept, and become text when it is read.
Prompts with images, and those that the mode does not encode, have no ids, and are not kept. Pure.
"""

from array import array
from collections.abc import Callable, Iterable

import msgspec

HEAD_TOKENS, TAIL_TOKENS = 512, 512
BYTES_MAX = 64 << 20
"""Of all prompts together; the oldest are dropped."""
_TOKEN_BYTES = 4
_ENTRY_BYTES = 512
"""Upper bound of an entry's size without its ids."""


class PromptText(msgspec.Struct, frozen=True):
    """The text of a prompt; between `head` and `tail` so many tokens are left out. A short prompt is all head."""

    head: str
    tail: str
    omitted_tokens: int


class KeptPrompts:
    """Prompts by the ids of their requests; a request that is sent again under the same id replaces the former."""

    def __init__(self, decode: Callable[[Iterable[int]], str], bytes_max: int = BYTES_MAX) -> None:
        """`decode` returns the text of token ids."""
        self._decode, self._bytes_max = decode, bytes_max
        self._kept: dict[str, tuple[bytes, bytes, int]] = {}
        self.size_bytes = 0
        """An upper bound of their size."""

    def keep(self, request_id: str, ids: bytes) -> None:
        """Keep the beginning and the end of a prompt, token ids as little-endian u32s."""
        if not ids:
            return
        head, rest = ids[: HEAD_TOKENS * _TOKEN_BYTES], ids[HEAD_TOKENS * _TOKEN_BYTES :]
        tail = rest[-TAIL_TOKENS * _TOKEN_BYTES :]
        self._drop(request_id)
        self._kept[request_id] = head, tail, (len(rest) - len(tail)) // _TOKEN_BYTES
        self.size_bytes += _size(request_id, head, tail)
        while self.size_bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def text(self, request_id: str) -> PromptText | None:
        """Return the text of a request's prompt; None if it is not kept."""
        if request_id not in self._kept:
            return None
        head, tail, omitted = self._kept[request_id]
        return PromptText(self._text_of(head), self._text_of(tail), omitted)

    def _drop(self, request_id: str) -> None:
        if request_id in self._kept:
            head, tail, _ = self._kept.pop(request_id)
            self.size_bytes -= _size(request_id, head, tail)

    def _text_of(self, ids: bytes) -> str:
        return self._decode(array("I", ids))


def _size(request_id: str, head: bytes, tail: bytes) -> int:
    return len(request_id) + len(head) + len(tail) + _ENTRY_BYTES
