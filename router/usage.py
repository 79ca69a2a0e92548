"""The engine's own count of reused tokens, found in an answer that is otherwise passed on unread.

Both a whole answer and a stream that carries usage name it once, near the end: `"cached_tokens": <n>`.
"""

import re

_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,10})')
_TAIL_BYTES = 64
"""Kept of the bytes before, so that a count cut in two by a chunk's end is found."""


class UsageReader:
    """Fed an answer's bytes in order; knows the last count in them."""

    def __init__(self) -> None:
        self._tail = b""
        self.cached_tokens: int | None = None

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        window = self._tail + chunk
        if b'"cached_tokens"' in window:
            found = _CACHED_TOKENS.findall(window)
            if found:
                self.cached_tokens = int(found[-1])
        self._tail = window[-_TAIL_BYTES:]
