"""The header with which an agent reports the decode time of an unstreamed response.

    worker -> router    header `x-kv-decode-ms: 812.4`    of an unstreamed response: milliseconds from the first token
                                                          to the moment when the response is sent

The first byte comes with the last token, so the router cannot see the first token. The router's time from routing to
the response, minus this time, is the TTFT that a stream would have. The router reads up to nine digits before the point
and six after it, and ignores anything else (`router/native/answer.cpp`).
"""

DECODE_HEADER = "x-kv-decode-ms"
_MS_PER_S = 1000.0


def decode_header(seconds: float) -> str:
    """Return the header's value."""
    return f"{seconds * _MS_PER_S:.3f}"
