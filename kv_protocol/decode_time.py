"""How an agent says when the first token of an unstreamed answer came.

    worker -> router    header `x-kv-decode-ms: 812.4`    of an answer that comes whole: milliseconds from the first
                                                          token to the moment when the answer is sent

The answer's first byte comes with its last token, so the router cannot see the first token. Its own time from routing
to the answer, less this, is what it would have seen of a stream.
"""

import re

DECODE_HEADER = "x-kv-decode-ms"
_MS_PER_S = 1000.0
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,6})?")


def decode_header(seconds: float) -> str:
    """Return the header's value."""
    return f"{seconds * _MS_PER_S:.3f}"


def decode_seconds(value: bytes) -> float | None:
    """Return the seconds that a header's value states; None where it is no decimal number of milliseconds."""
    return float(value) / _MS_PER_S if _MILLISECONDS.fullmatch(value) else None
