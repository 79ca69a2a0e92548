"""The inputs of the fold, and the questions that it returns.

    a message of a rank's stream    span        what the fold does with it
    ----------------------------    ---------   --------------------------------------------------------------------
    cannot be read                  -           it gets a `Received` without content: the rank's blocks may be wrong
    consecutive seqs                BatchSpan   the index applies the bytes if they continue the stream, else as below
    any other                       None        the message is decoded, and its batches are applied one by one

The core reads the span from batch heads, by the layout and rules of `kv_protocol/codec.py`. A message that breaks one
of the rules has no span; decoding it finds the fault.
"""

from typing import NamedTuple

import msgspec

from indexer.native import core
from kv_protocol import codec
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, RecoverRequest


class BatchSpan(NamedTuple):
    """The batches in a message: consecutive seqs of one epoch, and the time of the last batch."""

    epoch: int
    first_seq: int
    last_seq: int
    engine_time_ns: int


class Message(msgspec.Struct, frozen=True, gc=False):
    """The bytes of a valid message; `span` is None if its seqs are not consecutive."""

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


class Received(msgspec.Struct, frozen=True):
    """What was received of a rank: a message of its stream, a heartbeat, part of an answer; None: unreadable bytes."""

    rank: WorkerRank
    content: Message | Heartbeat | Answer | None


class WorkerCame(msgspec.Struct, frozen=True):
    """A worker registered; `capacity_blocks` is the capacity of each of its ranks (0: not reported)."""

    worker_id: str
    capacity_blocks: int
    instance: str = ""


class WorkerGone(msgspec.Struct, frozen=True):
    """A worker left; if `instance` is not empty, only that instance of it."""

    worker_id: str
    instance: str = ""


class LogConnected(msgspec.Struct, frozen=True):
    """The log is connected again, or disconnected: then silence proves nothing about workers."""

    is_connected: bool


Fact = Received | WorkerCame | WorkerGone | LogConnected


class Question(msgspec.Struct, frozen=True):
    """A question that the fold's caller sends to a rank's consolidator."""

    rank: WorkerRank
    request: RecoverRequest
