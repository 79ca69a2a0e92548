"""Which trace a request belongs to, as the header `traceparent` says it.

    00-<trace id, 32 digits>-<span id, 16 digits>-<flags, 2 digits>      lower-case hexadecimal

Ids of zeroes and version ff are invalid; a higher version may append fields behind a dash; of the flags, bit 0 says
that the caller samples the trace. Source: W3C Trace Context, 3.2 "Traceparent Header".
"""

import re
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 1


class TraceParent(NamedTuple):
    """A span in a trace: ids of 128 and 64 bits, neither 0."""

    trace_id: int
    span_id: int
    is_sampled: bool

    def header(self) -> bytes:
        """Return the value of `traceparent`."""
        return trace_parent(*self)


def trace_parent(trace_id: int, span_id: int, is_sampled: bool) -> bytes:  # noqa: FBT001 - of the header's fields
    """Return the value of `traceparent` of a span."""
    return b"00-%032x-%016x-%02x" % (trace_id, span_id, is_sampled)


def parsed_trace_parent(value: bytes) -> TraceParent | None:
    """Return the span that a `traceparent` names; None if it is invalid."""
    found = _FORM.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    named = TraceParent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return named if named.trace_id and named.span_id else None
