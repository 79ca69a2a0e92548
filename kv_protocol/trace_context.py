"""The trace of a request, from its header `traceparent`; and the trace of a message of KV events, from its name.

    00-<trace id, 32 digits>-<span id, 16 digits>-<flags, 2 digits>      lower-case hexadecimal

Ids of zeroes and version ff are invalid; a higher version may append fields after a dash; bit 0 of the flags says that
the caller samples the trace. Source: W3C Trace Context, 3.2 "Traceparent Header".

No message of KV events carries a context: agent and index compute the same ids from the name of the message.

    name       = <worker>/<rank>/<epoch>/<first seq>, the `Nats-Msg-Id` of the message (`subjects.message_id`)
    trace id   = xxh3 of the name, 128 bits
    span id    = xxh3 of the name, 64 bits: the span above all others of the trace

A process that traces a share of the messages compares the trace id with that share, as the samplers of OpenTelemetry
do: processes with the same share choose the same messages. Source: `docs/WIRE.md`.
"""

import re
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 1


class TraceParent(NamedTuple):
    """A span in a trace: ids of 128 and 64 bits, neither 0."""

    trace_id: int
    span_id: int
    is_sampled: bool


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


class EventTrace(NamedTuple):
    """The trace of one message, and its first span; neither id is 0."""

    trace_id: int
    span_id: int


def event_trace(rank: WorkerRank, epoch: int, first_seq: int) -> EventTrace:
    """Return the ids of the message of `rank` that begins with this batch."""
    name = subjects.message_id(rank, epoch, first_seq).encode()
    return EventTrace(xxh3_128_intdigest(name) or 1, xxh3_64_intdigest(name) or 1)
