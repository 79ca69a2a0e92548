"""The inputs of the fold, and the questions that it has sent."""

import msgspec

from indexer.follow.messages import Message
from kv_protocol.events import Batch
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, RecoverRequest


class BatchArrived(msgspec.Struct, frozen=True):
    """A batch of a rank's stream."""

    rank: WorkerRank
    batch: Batch


class MessageArrived(msgspec.Struct, frozen=True):
    """A message of a rank's stream: batches that were published together."""

    rank: WorkerRank
    message: Message


class HeartbeatArrived(msgspec.Struct, frozen=True):
    """A rank's pulse."""

    rank: WorkerRank
    heartbeat: Heartbeat


class AnswerArrived(msgspec.Struct, frozen=True):
    """A part of an answer of a rank's consolidator."""

    rank: WorkerRank
    answer: Answer


class BytesRefused(msgspec.Struct, frozen=True):
    """Something of a rank's stream could not be read."""

    rank: WorkerRank


class WorkerCame(msgspec.Struct, frozen=True):
    """A worker offers its service; each of its ranks has room for so many blocks (0: it does not say)."""

    worker_id: str
    capacity_blocks: int


class WorkerGone(msgspec.Struct, frozen=True):
    """A worker left: this life of it, or whichever it is where none is named."""

    worker_id: str
    instance: str = ""


class LogLost(msgspec.Struct, frozen=True):
    """The log cannot be heard: silence says nothing of the workers."""


class LogFound(msgspec.Struct, frozen=True):
    """The log can be heard again."""


RankFact = BatchArrived | MessageArrived | HeartbeatArrived | AnswerArrived | BytesRefused
Fact = RankFact | WorkerCame | WorkerGone | LogLost | LogFound


class Question(msgspec.Struct, frozen=True):
    """What the shell is to ask of a rank's consolidator."""

    rank: WorkerRank
    request: RecoverRequest
