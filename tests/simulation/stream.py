"""A stream of the broker's log: numbered, bounded, and deaf to what it has heard within the window.

    append     a message id heard within `WINDOW_S` is acknowledged again and not stored; else the next seq
    bounds     bytes, age by the broker's wall clock, messages of a subject: the oldest go
    purge      all up to a seq go
    read again after a restart the ids are those of the messages that are still there, as with JetStream

Source: JetStream's `Nats-Msg-Id` and `duplicate_window`, 30 s in `docs/WIRE.md`.
"""

from collections import deque
from typing import NamedTuple

from kv_runtime.event_log import LogStreamState

WINDOW_S = 30.0


class Stored(NamedTuple):
    """A message of a stream."""

    seq: int
    subject: str
    data: bytes
    time_ns: int
    message_id: str


class StreamBounds(NamedTuple):
    """What a stream keeps at most; 0: no bound."""

    bytes_max: int = 0
    age_max_s: float = 0.0
    per_subject: int = 0


class Stream:
    """One stream from its creation on."""

    def __init__(self, created: str, bounds: StreamBounds) -> None:
        self.created, self.bounds = created, bounds
        self.messages: deque[Stored] = deque()
        self.last_seq = 0
        self.bytes = 0
        self.dropped = 0
        """Messages that its bounds cost."""
        self._ids: dict[str, Stored] = {}

    @property
    def first_seq(self) -> int:
        """The seq of the first message that is still there, or would be the next."""
        return self.messages[0].seq if self.messages else self.last_seq + 1

    def state(self) -> LogStreamState:
        """Return what is in it now."""
        first_time_ns = self.messages[0].time_ns if self.messages else 0
        return LogStreamState(self.created, self.first_seq, self.last_seq, self.bytes, first_time_ns)

    def append(self, subject: str, data: bytes, message_id: str, now_ns: int) -> tuple[Stored, bool]:
        """Return the message as it is stored, and whether it is new."""
        known = self._ids.get(message_id) if message_id else None
        if known is not None and abs(now_ns - known.time_ns) < WINDOW_S * 1e9:
            return known, False
        self.last_seq += 1
        stored = Stored(self.last_seq, subject, data, now_ns, message_id)
        self.messages.append(stored)
        self.bytes += len(data)
        if message_id:
            self._ids[message_id] = stored
        self._keep_bounds(subject)
        self.expire(now_ns)
        return stored, True

    def _keep_bounds(self, subject: str) -> None:
        bounds = self.bounds
        while bounds.bytes_max and self.bytes > bounds.bytes_max:
            self.dropped += 1
            self._drop_first()
        if bounds.per_subject:
            of_subject = [stored for stored in self.messages if stored.subject == subject]
            for stored in of_subject[: -bounds.per_subject]:
                self.messages.remove(stored)
                self.bytes -= len(stored.data)

    def expire(self, now_ns: int) -> None:
        """What is too old by now is gone."""
        if self.bounds.age_max_s:
            oldest_ns = now_ns - self.bounds.age_max_s * 1e9
            while self.messages and self.messages[0].time_ns < oldest_ns:
                self.dropped += 1
                self._drop_first()

    def purge(self, up_to_seq: int) -> None:
        """Nothing up to this seq is there any more."""
        while self.messages and self.messages[0].seq <= up_to_seq:
            self._drop_first()

    def _drop_first(self) -> None:
        self.bytes -= len(self.messages.popleft().data)

    def after(self, seq: int) -> list[Stored]:
        """Return what is there behind `seq`."""
        return [stored for stored in self.messages if stored.seq > seq]

    def read_again(self) -> None:
        """The broker began anew with its data."""
        self._ids = {stored.message_id: stored for stored in self.messages if stored.message_id}
