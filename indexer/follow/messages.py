"""A message of a rank's stream, checked, without decoding its blocks.

    message              span        what the fold does with it
    ------------------   ---------   --------------------------------------------------------------------
    cannot be read       -           `MalformedMessage`: nothing
    seqs in a row        Span        if it continues the stream, the index applies the bytes
    any other            None        batch by batch, decoded

The span is read from the heads, by the layout and rules of `kv_protocol/codec.py`. Only a message that follows all of
them has a span; decoding any other one finds its fault.
"""

import struct
from typing import NamedTuple

import msgspec

from kv_protocol import codec
from kv_protocol.events import TIERS, U32_LIMIT

_COUNT = struct.Struct("<H")
_HEAD = struct.Struct("<IQQQqQII")
"""The head of `kv_protocol/codec.py`, with version, kind, tier and flags read as one number."""
_STORED, _REMOVED, _CLEARED = range(3)


def _word(kind: int, tier: int, flags: int) -> int:
    return int.from_bytes(bytes((codec.VERSION, kind, tier, flags)), "little")


_RULES = {
    **{_word(_STORED, tier, flags): (bool(flags), True) for tier in TIERS for flags in (0, 1)},
    **{_word(_REMOVED, tier, 0): (False, True) for tier in TIERS},
    **{_word(_CLEARED, tier, 0): (False, False) for tier in TIERS},
}
"""First word of a head -> whether its batch begins behind a parent, whether it names blocks."""


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
    if not _COUNT.size <= len(data) <= codec.MESSAGE_BYTES_MAX:
        return None
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    epoch, first_seq, seq, time_ns = 0, 0, 0, 0
    for index in range(count):
        if at + _HEAD.size > len(data):
            return None
        word, its_epoch, its_seq, _, time_ns, _, start, n = _HEAD.unpack_from(data, at)
        if _RULES.get(word) != (start > 0, n > 0) or start + n > U32_LIMIT:
            return None
        if index == 0:
            epoch, first_seq, seq = its_epoch, its_seq, its_seq
        else:
            seq += 1
        if its_seq != seq or its_epoch != epoch:
            return None
        at += _HEAD.size + 8 * n
    return BatchSpan(epoch, first_seq, seq, time_ns) if at == len(data) and first_seq else None
