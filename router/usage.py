"""What is looked at in an answer that is otherwise passed on unread: the count of reused tokens, and where events end.

Both a whole answer and a stream that carries usage name the engine's own count near the end: `"cached_tokens": <n>`.
"""

import re

_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,10})')
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
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


class WholeEvents:
    """Lets a stream's bytes through up to the last event's end, so that an error event never follows half an event.

    More than `HELD_BYTES_MAX` without an end is no event stream that we know: it goes through as it is.
    """

    HELD_BYTES_MAX = 1 << 20

    def __init__(self) -> None:
        self._held = b""

    def push(self, chunk: bytes) -> bytes:
        """Return what may be passed on now."""
        held = self._held + chunk
        end = max((at + len(mark) for mark in _EVENT_ENDS if (at := held.rfind(mark)) >= 0), default=0)
        if not end and len(held) > self.HELD_BYTES_MAX:
            end = len(held)
        self._held = held[end:]
        return held[:end]

    def flush(self) -> bytes:
        """Return what is held, at the stream's own end."""
        held, self._held = self._held, b""
        return held
