"""One rank's numbered stream: canonical events in, NATS messages out, bounded.

    event -> split to message size -> batch (epoch, seq from 1 without holes) -> waits -> message -> acknowledged

One message is in flight at a time, so that the log keeps the order; what comes meanwhile travels together in the next.
When more than `bytes_max` wait, the oldest batches are dropped and counted: the reader finds the gap and asks for a
dump, which the mirror answers. The engine is never held up.
"""

from collections import deque
from typing import NamedTuple

from kv_protocol.codec import (
    BATCHES_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    encode_batch,
    pack_message,
    split_event,
)
from kv_protocol.events import Batch, Event

_COUNT_BYTES = 2


class OutMessage(NamedTuple):
    """A message to publish: its first and last seq, and its bytes."""

    first_seq: int
    last_seq: int
    payload: bytes


class Outbox:
    """The stream of one `(worker_id, dp_rank, epoch)`."""

    def __init__(self, epoch: int, *, bytes_max: int = 64 * 1024 * 1024) -> None:
        self.epoch = epoch
        self.last_seq = 0
        self.dropped_batches_total = 0
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._in_flight: OutMessage | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not acknowledged yet."""
        return self._waiting_bytes + (len(self._in_flight.payload) if self._in_flight else 0)

    def add(self, event: Event, *, source_seq: int, engine_time_ns: int) -> None:
        """`event` has its seq (several, when it is large) and waits to be published."""
        for part in split_event(event):
            self.last_seq += 1
            encoded = encode_batch(Batch(self.epoch, self.last_seq, part, source_seq, engine_time_ns))
            self._waiting.append((self.last_seq, encoded))
            self._waiting_bytes += len(encoded)
        while self._waiting_bytes > self._bytes_max:
            self._waiting_bytes -= len(self._waiting.popleft()[1])
            self.dropped_batches_total += 1

    def next_message(self) -> OutMessage | None:
        """Return the message to publish now: the unacknowledged one again, or the next; None when nothing waits."""
        if self._in_flight is None and self._waiting:
            self._in_flight = self._take()
        return self._in_flight

    def acknowledge(self) -> None:
        """The message in flight is in the log."""
        self._in_flight = None

    def _take(self) -> OutMessage:
        taken: list[bytes] = []
        first_seq = last_seq = self._waiting[0][0]
        room = MESSAGE_BYTES_MAX - _COUNT_BYTES
        while self._waiting and len(taken) < BATCHES_PER_MESSAGE_MAX and len(self._waiting[0][1]) <= room:
            last_seq, encoded = self._waiting.popleft()
            taken.append(encoded)
            room -= len(encoded)
            self._waiting_bytes -= len(encoded)
        return OutMessage(first_seq, last_seq, pack_message(taken))
