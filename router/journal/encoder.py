"""Turns what was applied into numbered journal messages.

record         what was applied becomes records at once, each in parts if it is longer than a message. What waits is
               bounded: beyond that the oldest gives way, and is counted
a checkpoint   becomes records one by one, when it is its turn (`step`), so that its size blocks nothing
losses         `Lost` takes the numbers of lost records. `broken_by` has them until the next checkpoint is taken
cut            the next message
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from kv_protocol.checkpoint import CheckpointEnded
from kv_protocol.errors import LimitExceeded
from kv_protocol.journal import RECORD_BYTES_MAX, JournalRecord, Lost, encode_record, in_parts, pack_journal
from router.decision.verdict import Verdict
from router.journal.checkpoint import JournalCheckpoint
from router.journal.records import Recordable, RecordedStandings

BYTES_MAX = 128 << 20
"""Bytes of records that may wait for the log; the longest record has half of it."""
_MESSAGES_MIN = 4
"""A full buffer has at least so many messages: giving up the oldest loses only a part of it."""
_RECORDS_MAX = 4096
"""Of one message."""
LossReason = Literal["buffer_full", "too_large", "not_encodable", "log_away"]
"""The buffer was full; a record took too many parts; it holds what msgpack has no room for; the log did not take it
before the router ended."""
LOSS_REASONS: tuple[LossReason, ...] = get_args(LossReason)
_NOT_ENCODABLE = (OverflowError, TypeError, ValueError)


class EncodedMessage(NamedTuple):
    """A message, the number of its first record, and its number of records."""

    data: bytes
    first: int
    records: int


class _Batch:
    """Records of one message. `numbers`: how many they are, with those that they state as lost."""

    __slots__ = ("numbers", "records", "size")

    def __init__(self) -> None:
        self.records = list[bytes]()
        self.size = self.numbers = 0

    def add(self, encoded: bytes, numbers: int = 1) -> None:
        """Add a record."""
        self.records.append(encoded)
        self.size += len(encoded)
        self.numbers += numbers


class _Checkpoint(NamedTuple):
    """A checkpoint that waits for its turn."""

    records: Iterator[JournalRecord]


class JournalEncoder:
    """The records of one run that wait to be published."""

    def __init__(
        self,
        life: int,
        kv_seq: Callable[[], int] = lambda: 0,
        bytes_max: int = BYTES_MAX,
        now_s: float = 0.0,
        on_waiting: Callable[[bool], None] = lambda _is_due: None,
        on_full: Callable[[int], None] = lambda _bytes: None,
        on_broken: Callable[[Mapping[LossReason, int]], None] = lambda _lost: None,
    ) -> None:
        """`kv_seq` says how far the index has read `KV_EVENTS`.

        `on_waiting` is called when the first record comes, and with True when a message is complete; `on_full` with
        the bytes that wait when the oldest begin to give way; `on_broken` when a checkpoint follows these losses.
        """
        self._life, self._kv_seq, self._bytes_max, self._on_waiting = life, kv_seq, bytes_max, on_waiting
        self._on_full, self._on_broken = on_full, on_broken
        self._message_bytes_max = min(RECORD_BYTES_MAX, bytes_max // _MESSAGES_MIN)
        self._standings = RecordedStandings()
        self._first = deque[_Batch]()  # of a checkpoint, or of what gave way
        self._waiting = deque[_Batch | _Checkpoint]()
        self._waiting_bytes = 0
        self._newest = _Batch()
        self._checkpoint: Iterator[JournalRecord] | None = None
        self._part = _Batch()
        self._checkpoint_from = 0
        self._next = 1
        self.is_in_checkpoint = False
        """Whether a checkpoint waits for its turn, or is being encoded."""
        self.records_total = self.bytes_total = 0
        """Of complete messages."""
        self.checkpoints_total = 0
        self.checkpoint_bytes = 0
        """Of the last complete checkpoint."""
        self.checkpoint_at = now_s, 0, 0
        """When the last checkpoint ended, or this run began; `records_total` and `bytes_total` then."""
        self.pushed_out = 0
        """Records that gave way, of which no message says so yet."""
        self.lost: Counter[LossReason] = Counter()
        self.broken_by: Counter[LossReason] = Counter()
        """Losses behind the newest checkpoint that was taken: replay is not exact until the next."""

    def __len__(self) -> int:
        batches = (*self._first, self._part, *self._waiting, self._newest)
        return sum(len(each.records) for each in batches if isinstance(each, _Batch))

    # ------------------------------------------------------------------------------------------------- what is added

    def record(self, what: Recordable) -> None:
        """Add the records of `what`. Of what cannot be encoded the loss is recorded: no record may end the process."""
        if isinstance(what, JournalCheckpoint):
            self._complete()
            self._waiting.append(_Checkpoint(self._standings.checkpoint(what)))
            self.is_in_checkpoint = True
            if self.broken_by:
                self._on_broken(self.broken_by)
            self.broken_by.clear()
            return
        try:
            encoded = self._decided(what) if type(what) is Verdict else encode_record(what)
        except _NOT_ENCODABLE:
            encoded = self._loss(1, "not_encodable", what.now_s)
        newest = self._newest
        size = newest.size + len(encoded)
        if 0 < newest.numbers < _RECORDS_MAX and size <= self._message_bytes_max:  # the usual case
            newest.records.append(encoded)
            newest.size = size
            newest.numbers += 1
            return
        try:
            parts = in_parts(encoded, what.now_s)
        except LimitExceeded:
            parts = (self._loss(1, "too_large", what.now_s),)
        for part in parts:
            self._add(part)

    def _decided(self, verdict: Verdict) -> bytes:
        """Return the decision's record, behind those of the standings that it is the first to see."""
        model_view, epochs, trusts = self._standings.seen
        if verdict.trusts is not trusts or verdict.epochs is not epochs or verdict.model_view is not model_view:
            for standing in self._standings.changed(verdict):
                self._add(encode_record(standing))
        return verdict.journal_record(self._kv_seq())

    def _add(self, encoded: bytes) -> None:
        newest = self._newest
        if newest.numbers >= _RECORDS_MAX or newest.size + len(encoded) > self._message_bytes_max:
            self._complete()
            self._make_room()
        self._newest.add(encoded)
        self._on_waiting(bool(self._waiting))

    def _complete(self) -> None:
        """Begin another message."""
        if not self._newest.records:
            return
        self._waiting.append(self._newest)
        self._waiting_bytes += self._newest.size
        self._newest = _Batch()

    def _make_room(self) -> None:
        """The oldest gives way if too much waits."""
        while self._waiting_bytes > self._bytes_max:
            if not self.pushed_out:
                self._on_full(self._waiting_bytes)
            oldest = self._waiting.popleft()
            if isinstance(oldest, _Checkpoint):
                self.is_in_checkpoint = False
            else:
                self._waiting_bytes -= oldest.size
                self.pushed_out += oldest.numbers

    def _loss(self, count: int, reason: LossReason, now_s: float) -> bytes:
        self.lost[reason] += count
        self.broken_by[reason] += count
        return encode_record(Lost(now_s=now_s, count=count))

    # ------------------------------------------------------------------------------------------------- messages

    def cut(self, now_s: float = 0.0) -> EncodedMessage:
        """Return a message of the oldest records."""
        while not self.step(now_s):
            pass
        if self._first:
            batch = self._first.popleft()
        else:
            if not self._waiting:
                self._complete()
            oldest = self._waiting.popleft() if self._waiting else _Batch()
            assert isinstance(oldest, _Batch), "`step` has begun a checkpoint that is the oldest"
            batch = oldest
            self._waiting_bytes -= batch.size
        first = self._next
        self._next += batch.numbers
        self.records_total += len(batch.records)
        self.bytes_total += batch.size
        return EncodedMessage(pack_journal(self._life, first, batch.records), first, len(batch.records))

    def step(self, now_s: float) -> bool:
        """Encode the next record of a checkpoint, if it is its turn; return whether `cut` has a message, or nothing."""
        if self._first:
            return True
        if self._checkpoint is None:
            if self.pushed_out:
                lost = _Batch()
                lost.add(self._loss(self.pushed_out, "buffer_full", now_s), self.pushed_out)
                self.pushed_out = 0
                self._first.append(lost)
                return True
            if not self._waiting or not isinstance(oldest := self._waiting[0], _Checkpoint):
                return True
            self._waiting.popleft()
            self._checkpoint, self._checkpoint_from = oldest.records, self.bytes_total
        elif self._go_on(self._checkpoint, now_s):
            self._first.append(self._part)
            self._part, self._checkpoint, self.is_in_checkpoint = _Batch(), None, False
        return bool(self._first)

    def _go_on(self, checkpoint: Iterator[JournalRecord], now_s: float) -> bool:
        """Encode the next record of the checkpoint; return whether it is the last."""
        try:
            record = next(checkpoint)
            parts = in_parts(encode_record(record), now_s)
        except (LimitExceeded, *_NOT_ENCODABLE) as error:  # a row that msgpack or a record has no room for
            self._part.add(self._loss(1, "too_large" if isinstance(error, LimitExceeded) else "not_encodable", now_s))
            return True
        for part in parts:
            if self._part.size + len(part) > RECORD_BYTES_MAX:
                self._first.append(self._part)
                self._part = _Batch()
            self._part.add(part)
        if not isinstance(record, CheckpointEnded):
            return False
        batches = (*self._first, self._part)
        records = self.records_total + sum(len(each.records) for each in batches)
        bytes_ = self.bytes_total + sum(each.size for each in batches)
        self.checkpoints_total += 1
        self.checkpoint_bytes = bytes_ - self._checkpoint_from
        self.checkpoint_at = now_s, records, bytes_
        return True
