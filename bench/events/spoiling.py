"""What may befall one rank's messages between the log and an index."""

from indexer.follow.messages import message_span
from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import LogMessage

_EVENTS = "kv.v1.events."
_LAST_HASH = -8


def unspoiled(message: LogMessage) -> LogMessage:
    """Return it as it is."""
    return message


class Losing:
    """All that is said of the rank is lost, heartbeats too."""

    def __init__(self, rank: WorkerRank) -> None:
        self._rank = rank
        self.lost_seq = 0
        """The last batch that was lost."""

    def __call__(self, message: LogMessage) -> LogMessage | None:
        """Return what is left of the message."""
        if not _is_of(message, self._rank):
            return message
        span = message_span(message.data) if message.subject.startswith(_EVENTS) else None
        self.lost_seq = span.last_seq if span else self.lost_seq
        return None


class Damaging:
    """The last hash of the rank's next message of events is another, in the same bucket; what follows is right."""

    def __init__(self, rank: WorkerRank) -> None:
        self._rank = rank
        self._is_done = False

    def __call__(self, message: LogMessage) -> LogMessage | None:
        """Return what is left of the message."""
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
