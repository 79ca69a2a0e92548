"""Faults in one rank's messages between the log and an index."""

from indexer.follow.messages import message_span
from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import LogMessage

_EVENTS = "kv.v1.events."
_LAST_HASH = -8


def unspoiled(message: LogMessage) -> LogMessage:
    """Return the message unchanged."""
    return message


class Losing:
    """Drops all messages of the rank, also heartbeats."""

    def __init__(self, rank: WorkerRank) -> None:
        self._rank = rank
        self.lost_seq = 0
        """The last batch that was dropped."""

    def __call__(self, message: LogMessage) -> LogMessage | None:
        """Return the message as the index gets it; None: it is dropped."""
        if not _is_of(message, self._rank):
            return message
        span = message_span(message.data) if message.subject.startswith(_EVENTS) else None
        self.lost_seq = span.last_seq if span else self.lost_seq
        return None


class Damaging:
    """Changes the last hash of the rank's next message of events, within its bucket; later messages stay intact."""

    def __init__(self, rank: WorkerRank) -> None:
        self._rank = rank
        self._is_done = False

    def __call__(self, message: LogMessage) -> LogMessage | None:
        """Return the message as the index gets it; None: it is dropped."""
        if self._is_done or not message.subject.startswith(_EVENTS) or not _is_of(message, self._rank):
            return message
        self._is_done = True
        data = bytearray(message.data)
        data[_LAST_HASH] ^= 1
        return message._replace(data=bytes(data))


def _is_of(message: LogMessage, rank: WorkerRank) -> bool:
    try:
        return subjects.rank_of(message.subject) == rank
    except MalformedMessage:
        return False
