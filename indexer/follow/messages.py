"""A message of a rank's stream, checked, without decoding its blocks.

    message              span        what the fold does with it
    ------------------   ---------   --------------------------------------------------------------------
    cannot be read       -           `MalformedMessage`: nothing
    seqs in a row        Span        if it continues the stream, the index applies the bytes
    any other            None        batch by batch, decoded

The core reads the span from the heads, by the layout and rules of `kv_protocol/codec.py`. Only a message that follows
all of them has a span; decoding any other one finds its fault.
"""

from typing import NamedTuple

import msgspec

from indexer.native import core
from kv_protocol import codec


class BatchSpan(NamedTuple):
    """The batches in a message: consecutive seqs of one epoch, and the time of the last batch."""

    epoch: int
    first_seq: int
    last_seq: int
    engine_time_ns: int


class Message(msgspec.Struct, frozen=True, gc=False):
    """The bytes of a valid message; `span` if the heads have one."""

    data: bytes
    span: BatchSpan | None
    engine_time_ns: int
    """The engine side's wall clock when the last batch was made."""


def read_message(data: bytes) -> Message:
    """Return the message in `data`; raise `MalformedMessage`, with offset and reason, for anything else."""
    span = message_span(data)
    if span is not None:
        return Message(data, span, span.engine_time_ns)
    return Message(data, None, codec.decode_message(data)[-1].engine_time_ns)


def message_span(data: bytes) -> BatchSpan | None:
    """Return the span of a message; None if it is malformed or its seqs are not consecutive."""
    found = core.message_span(data)
    return None if found is None else BatchSpan(*found)
