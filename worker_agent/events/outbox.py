"""One rank's numbered stream: canonical events in, NATS messages out, bounded.

event -> split to message size -> batch (epoch, seq from 1 without holes) -> waiting -> message -> in flight, ring

waiting     at most `bytes_max`; beyond that the oldest batches are dropped and counted. The reader finds the gap and
            requests a dump, which the mirror answers. The engine is never blocked
in flight   sent and not acknowledged, at most `window` messages; each is acknowledged on its own. With
            `SMALL_MAX` or more in flight only full messages are sent, so that later batches share a message
boundary    a seq that a heartbeat carries: no message crosses it, so that a reader can compare digests exactly there
go back     if the log did not take a message, all in flight are sent again, unchanged and in order, before new ones
ring        sent batches, for readers that request the batches after a seq: at most `ring_bytes_max`, the oldest are
            dropped. If waiting batches are dropped, all in the ring are, too: a replay cannot cross the gap
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from kv_protocol.codec import (
    BATCHES_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    encode_batch,
    pack_message,
    split_event,
)
from kv_protocol.events import Batch, Event

SMALL_MAX = 4
RING_BYTES_MAX = 16 << 20
ENTRY_BYTES = 56
"""Memory of a batch in the ring beside its bytes."""
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - 2


class OutMessage(NamedTuple):
    """A message to publish: its first and last seq, and its bytes."""

    first_seq: int
    last_seq: int
    payload: bytes


class Outbox:
    """The stream of one `(worker_id, dp_rank, epoch)`."""

    bytes_max = 64 << 20
    """How many bytes of batches may wait for NATS. Beyond it a dump costs less than sending all that was missed."""
    window = 32
    """How many messages may be in flight."""

    def __init__(self, epoch: int, *, ring_bytes_max: int = RING_BYTES_MAX) -> None:
        self.epoch = epoch
        self.last_seq = 0
        self.dropped_batches_total = 0
        self._ring_bytes_max = ring_bytes_max
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._boundaries: deque[int] = deque()
        self._in_flight: dict[int, OutMessage] = {}
        self._again: deque[OutMessage] = deque()
        self._ring: deque[bytes] = deque()
        self.ring_bytes = 0
        """Memory of the batches kept for replays."""

    @property
    def unacked_bytes(self) -> int:
        """Bytes of batches that the log has not acknowledged yet."""
        return self._waiting_bytes + sum(len(message.payload) for message in self._in_flight.values())

    @property
    def settled_seq(self) -> int:
        """The seq up to which every batch is acknowledged or dropped."""
        return min(self._in_flight, default=self._given_seq + 1) - 1

    @property
    def _given_seq(self) -> int:
        return self.last_seq - len(self._waiting)

    def add(self, event: Event, *, source_seq: int, engine_time_ns: int) -> None:
        """Number `event` (with several seqs if it is large) and queue it."""
        for part in split_event(event):
            self.last_seq += 1
            encoded = encode_batch(Batch(self.epoch, self.last_seq, part, source_seq, engine_time_ns))
            self._waiting.append(encoded)
            self._waiting_bytes += len(encoded)
        if self._waiting_bytes > self.bytes_max:
            self._drop()

    def _drop(self) -> None:
        while self._waiting_bytes > self.bytes_max:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.dropped_batches_total += 1
        self._ring.clear()
        self.ring_bytes = 0

    def end_message_here(self) -> None:
        """Let a message end at the last seq, which a heartbeat carries, unless the seq is already sent or dropped."""
        self._forget_passed()
        if self._waiting and self.last_seq not in self._boundaries:
            self._boundaries.append(self.last_seq)

    def _forget_passed(self) -> None:
        while self._boundaries and self._boundaries[0] <= self._given_seq:
            self._boundaries.popleft()

    def next_message(self) -> OutMessage | None:
        """Return the message to publish now; None if no batch waits, or acknowledgements must come first."""
        if self._again:
            return self._again.popleft()
        flying = len(self._in_flight)
        is_due = flying < SMALL_MAX or self._waiting_bytes >= _PAYLOAD_BYTES_MAX
        if not self._waiting or not is_due or flying >= self.window:
            return None
        message = self._take()
        self._in_flight[message.first_seq] = message
        return message

    def acknowledge(self, message: OutMessage) -> None:
        """Note that a message is in the log."""
        if self._in_flight.pop(message.first_seq, None) is not None:
            self._again = deque(each for each in self._again if each.first_seq != message.first_seq)

    def go_back(self) -> None:
        """Queue all messages in flight to be published again."""
        self._again = deque(self._in_flight.values())

    def tail(self, after_seq: int, bytes_max: int) -> list[bytes] | None:
        """Return messages of every batch after `after_seq`, published or not, in order.

        None: one of them is not kept any more, they exceed `bytes_max` in all, or `after_seq` is after the last seq.
        """
        newest = self.last_seq - after_seq
        available = len(self._ring) + len(self._waiting)
        if not 0 <= newest <= available:
            return None
        batches = list(islice(chain(self._ring, self._waiting), available - newest, None))
        return list(map(pack_message, _fitting(batches))) if sum(map(len, batches)) <= bytes_max else None

    def _take(self) -> OutMessage:
        first_seq = self._given_seq + 1
        self._forget_passed()
        batches = next(
            _fitting(islice(self._waiting, self._boundaries[0] - self._given_seq if self._boundaries else None))
        )
        for encoded in batches:
            self._waiting.popleft()
            self._waiting_bytes -= len(encoded)
            self.ring_bytes += len(encoded) + ENTRY_BYTES
        self._ring += batches
        while self.ring_bytes > self._ring_bytes_max:
            self.ring_bytes -= len(self._ring.popleft()) + ENTRY_BYTES
        return OutMessage(first_seq, self._given_seq, pack_message(batches))


def _fitting(batches: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group the batches into messages, in order."""
    batch_group: list[bytes] = []
    free_bytes = _PAYLOAD_BYTES_MAX
    for encoded in batches:
        if len(encoded) > free_bytes or len(batch_group) == BATCHES_PER_MESSAGE_MAX:
            yield batch_group
            batch_group, free_bytes = [], _PAYLOAD_BYTES_MAX
        batch_group.append(encoded)
        free_bytes -= len(encoded)
    if batch_group:
        yield batch_group
