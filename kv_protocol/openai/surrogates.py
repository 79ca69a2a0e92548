r"""Finds lone surrogates in JSON: `\ud83d\ude00` is one character, one half without the other is none.

Decoders refuse them as JSON that is cut off or malformed; our error names the escape.
Source: RFC 8259, section 8.2.
"""

import re

_SLICE = 256 << 10
_PAIR_BYTES = len(rb"\ud83d\ude00")
_SOUND = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+", re.DOTALL
)
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def lone_surrogate(text: bytes | bytearray | memoryview) -> str:
    """Return the first lone surrogate and its place; empty: there is none, or an escape before it is malformed."""
    at, end = 0, len(text)
    while at < end:
        window = min(at + _SLICE, end)
        found = _SOUND.match(text, at, window)
        assert found is not None, "the pattern matches nothing at all, too"
        if window == end or found.end() <= window - _PAIR_BYTES:
            half = _HALF.match(text, found.end())
            return f"{half[0].decode()} at byte {half.start()}" if half else ""
        at = found.end()
    return ""
