"""The trace of a message of KV events: agent and index compute the same ids from what the message is named by.

    name       = <worker>/<rank>/<epoch>/<first seq>, the `Nats-Msg-Id` of the message (`subjects.message_id`)
    trace id   = xxh3 of the name, 128 bits
    span id    = xxh3 of the name, 64 bits: the span above all others of the trace

So no message carries a context. A process that traces a share of the messages compares the trace id with that share, as
the samplers of OpenTelemetry do: processes with the same share choose the same messages. Source: `docs/WIRE.md`.
"""

from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank


class EventTrace(NamedTuple):
    """The trace of one message, and its first span; neither id is 0."""

    trace_id: int
    span_id: int


def event_trace(rank: WorkerRank, epoch: int, first_seq: int) -> EventTrace:
    """Return the ids of the message of `rank` that begins with this batch."""
    name = subjects.message_id(rank, epoch, first_seq).encode()
    return EventTrace(xxh3_128_intdigest(name) or 1, xxh3_64_intdigest(name) or 1)
