"""Caches encoded chats, so that only the new part of the next turn is encoded.

    known(text)     the longest beginning of `text`, up to a mark, that a cached chat has too, and its ids
    keep(...)       a chat, its ids, and where both may be cut

Exact: texts are compared byte for byte, and are cut only before marks, across which encoding does not look back
(`kv_runtime/text/marks.py`). Cached texts are sorted, and one of a text's two neighbours shares the most with it, so a
search is a bisection. A longer version of a chat replaces the former one; beyond `bytes_max` the least recently used
chats are evicted. Thread-safe.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

_TOKEN_BYTES = 4
_TEXT_BYTES = 3
"""Bytes that become four characters of base64."""
_TEXT_CHARACTERS = 4
_ENTRY_BYTES = 600
_CUT_BYTES = 120
"""Approximate overhead of a chat, and of a cut."""


class Cut(NamedTuple):
    """A position before a mark: its byte, the byte after the mark, and the number of tokens before it."""

    at: int
    mark_end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CachedChat:
    """A chat: its text in UTF-8, its ids as packed u32s, these in base64, and its cuts in order."""

    text: bytes
    ids: bytes
    encoded: bytes
    cuts: tuple[Cut, ...]

    @property
    def size_bytes(self) -> int:
        """Its approximate size."""
        return len(self.text) + len(self.ids) + len(self.encoded) + _ENTRY_BYTES + _CUT_BYTES * len(self.cuts)


class Known(NamedTuple):
    """The known beginning of a text: its chat, and how many of that one's cuts; it ends at the last of them."""

    chat: CachedChat
    cut_count: int

    @property
    def cut(self) -> Cut:
        """The cut where it ends."""
        return self.chat.cuts[self.cut_count - 1]

    @property
    def ids(self) -> memoryview:
        """Its ids."""
        return memoryview(self.chat.ids)[: self.cut.tokens * _TOKEN_BYTES]

    @property
    def encoded(self) -> memoryview:
        """As much of its ids in base64 as can be extended."""
        known_texts = self.cut.tokens * _TOKEN_BYTES // _TEXT_BYTES
        return memoryview(self.chat.encoded)[: known_texts * _TEXT_CHARACTERS]


class PrefixCache:
    """Chats of one model, in at most about `bytes_max` bytes; 0 keeps none."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._texts: list[bytes] = []
        self._chats: OrderedDict[bytes, CachedChat] = OrderedDict()
        self._lock = Lock()
        self.size_bytes = 0
        self.evicted = 0
        self.requested_bytes = 0
        self.known_bytes = 0

    def __len__(self) -> int:
        return len(self._chats)

    def chats(self) -> list[CachedChat]:
        """Return the kept chats, in the order of their texts."""
        with self._lock:
            return [self._chats[text] for text in self._texts]

    def known(self, text: bytes) -> Known | None:
        """Return the longest known beginning of `text`, None if there is none; its chat counts as used."""
        with self._lock:
            self.requested_bytes += len(text)
            place = bisect_left(self._texts, text)
            found = max(
                (self._shared(each, text) for each in self._texts[max(0, place - 1) : place + 1]),
                key=lambda known: known.cut.at if known.cut_count else 0,
                default=None,
            )
            if found is None or not found.cut_count:
                return None
            self._chats.move_to_end(found.chat.text)
            self.known_bytes += found.cut.at
            return found

    def keep(self, chat: CachedChat) -> None:
        """Keep the chat, in place of the chat that it extends."""
        if chat.size_bytes > self._bytes_max:
            return
        with self._lock:
            if chat.text in self._chats:
                return
            place = bisect_right(self._texts, chat.text)
            if place and chat.text.startswith(self._texts[place - 1]):
                self._forget(self._texts[place - 1])
            insort(self._texts, chat.text)
            self._chats[chat.text] = chat
            self.size_bytes += chat.size_bytes
            while self.size_bytes > self._bytes_max:
                self._forget(next(iter(self._chats)))
                self.evicted += 1

    def _shared(self, cached_text: bytes, text: bytes) -> Known:
        chat = self._chats[cached_text]
        shared = shared_bytes(cached_text, text)
        return Known(chat, bisect_right(chat.cuts, shared, key=lambda cut: cut.mark_end))

    def _forget(self, text: bytes) -> None:
        self.size_bytes -= self._chats.pop(text).size_bytes
        del self._texts[bisect_left(self._texts, text)]


def shared_bytes(one: bytes, other: bytes) -> int:
    """Return how many leading bytes both share."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
