"""Marks: added tokens before which a text may be cut, because the tokenizer finds them in any context.

The `tokenizers` library extracts added tokens from a text first: those that are not normalized, leftmost, then longest.
The text between them is encoded separately. So a text may be cut before each of them, if no overlapping token wins. A
token is a mark when it

    is not normalized, is not `single_word`, and does not strip the space before it
    neither begins nor ends with white space, which other tokens may strip
    is part of no other such token, except as its beginning, and no token, including itself, ends with its beginning

and the template, or one of its special tokens, contains it: other marks never occur. The text from one mark to the next
is a segment; the turns of a chat repeat those of the turns before (`Segments`).
Source: tokenizers 0.23, `AddedVocabulary`.
"""

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from itertools import filterfalse
from threading import Lock
from typing import NamedTuple

from tokenizers import AddedToken

_SEGMENT_BYTES = 300
"""Approximate overhead of a kept segment."""


def mark_pattern(added: Iterable[AddedToken], written: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds the marks among the `added` tokens in `written`; without marks it matches nothing."""
    found_first = [token for token in added if not token.normalized]
    contents = [token.content for token in found_first]
    marks = [
        token.content
        for token in found_first
        if _is_steady(token, contents) and any(token.content in text for text in written)
    ]
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _is_steady(token: AddedToken, contents: list[str]) -> bool:
    content = token.content
    if not content or token.lstrip or token.single_word or content != content.strip():
        return False
    return not any(_takes(other, content) for other in contents)


def _takes(other: str, content: str) -> bool:
    """Return whether an occurrence of `other` may cover the beginning of one of `content` that begins later."""
    ends_as_it_begins = any(other.endswith(content[:length]) for length in range(1, len(content)))
    return ends_as_it_begins or content in other[1:]


class KeptSegments(NamedTuple):
    """Totals of text whose ids were kept, and of text that was encoded; segments kept now, and their memory."""

    hit_bytes: int = 0
    miss_bytes: int = 0
    entries: int = 0
    bytes: int = 0


class Segments:
    """The ids of segments; beyond `bytes_max` the least recently used are dropped. Thread-safe."""

    def __init__(self, marks: re.Pattern[str], bytes_max: int) -> None:
        self._marks, self._bytes_max = marks, bytes_max
        self._ids = OrderedDict[str, bytes]()
        self._lock = Lock()
        self._size_bytes = self._hit_bytes = self._miss_bytes = 0

    def pack(self, text: str, encode: Callable[[list[str]], list[bytes]]) -> bytes:
        """Return the ids of the text; `encode` returns those of segments that are not kept."""
        places = [0, *map(re.Match.start, self._marks.finditer(text)), len(text)]
        segments = [*filter(None, map(text.__getitem__, map(slice, places, places[1:])))]
        distinct, ids_of = dict.fromkeys(segments), self._ids
        with self._lock:
            known = [*filter(ids_of.__contains__, distinct)]
            found = dict(zip(known, map(ids_of.__getitem__, known), strict=True))
            deque(map(ids_of.move_to_end, known), maxlen=0)
        new = [*filterfalse(found.__contains__, distinct)]
        made = dict(zip(new, encode(new), strict=True))
        found |= made
        miss_bytes = sum(map(len, map(str.encode, filter(made.__contains__, segments))))
        with self._lock:
            self._miss_bytes += miss_bytes
            self._hit_bytes += (len(text) if text.isascii() else len(text.encode())) - miss_bytes
            for each, ids in made.items():
                if each not in ids_of:  # else another thread encoded it, too
                    ids_of[each] = ids
                    self._size_bytes += _size(each, ids)
            while self._size_bytes > self._bytes_max:
                self._size_bytes -= _size(*ids_of.popitem(last=False))
        return b"".join(map(found.__getitem__, segments))

    def kept(self) -> KeptSegments:
        """Return the figures."""
        return KeptSegments(self._hit_bytes, self._miss_bytes, len(self._ids), self._size_bytes)


def _size(segment: str, ids: bytes) -> int:
    return len(segment) + len(ids) + _SEGMENT_BYTES
