"""Turns applied records into numbered journal messages.

add            an applied input becomes records, each in parts if it is longer than a message
a checkpoint   becomes records one by one (`go_on`), so that its size blocks nothing; nothing is added meanwhile
lose           records that are lost: `Lost` takes their numbers. `is_broken` until the next checkpoint
cut            the next message
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from kv_protocol.checkpoint import CheckpointEnded
from kv_protocol.errors import LimitExceeded
from kv_protocol.journal import RECORD_BYTES_MAX, JournalRecord, Lost, encode_record, in_parts, pack_journal
from router.journal.checkpoint import JournalCheckpoint
from router.journal.records import Encodable, Recordable, Shortener

LossReason = Literal["buffer_full", "too_large", "not_encodable", "log_away"]
"""The buffer was full; a record took too many parts; it holds what msgpack has no room for; the log did not take it
before the router ended."""
_NOT_ENCODABLE = (OverflowError, TypeError, ValueError)
_Records = Iterator[JournalRecord]
LOSS_REASONS: tuple[LossReason, ...] = get_args(LossReason)


class EncodedMessage(NamedTuple):
    """A message, the number of its first record, and its number of records."""

    data: bytes
    first: int
    records: int


class JournalEncoder:
    """The records of one run that wait to be published."""

    def __init__(self, life: int) -> None:
        self._life = life
        self._shortener = Shortener()
        self._encoded: deque[tuple[bytes, int]] = deque()
        self._next = 1
        self._checkpoint: _Records | None = None
        self._checkpoint_bytes = 0
        self.waiting_bytes = 0
        self.records_total = self.bytes_total = 0
        self.checkpoints_total = 0
        self.checkpoint_bytes = 0
        """Of the last complete checkpoint."""
        self.lost: Counter[LossReason] = Counter()
        self.broken_by: Counter[LossReason] = Counter()
        """Losses since the last checkpoint: replay is not exact until the next."""

    def __len__(self) -> int:
        return len(self._encoded)

    @property
    def is_in_checkpoint(self) -> bool:
        """Whether a checkpoint is being encoded."""
        return self._checkpoint is not None

    def add(self, what: Recordable, kv_seq: int, now_s: float) -> None:
        """Add its records, or begin a checkpoint."""
        if isinstance(what, JournalCheckpoint):
            self._checkpoint, self._checkpoint_bytes = self._shortener.checkpoint(what), 0
            self.broken_by.clear()
            self.go_on(now_s)
            return
        try:
            records = self._shortener.records(what, kv_seq)
        except _NOT_ENCODABLE:
            self.lose(1, "not_encodable", now_s)
            return
        for record in records:
            self._keep(record, now_s)

    def go_on(self, now_s: float) -> None:
        """Encode the next record of the checkpoint."""
        if self._checkpoint is None:
            return
        try:
            record = next(self._checkpoint)
        except _NOT_ENCODABLE:  # a row that msgpack has no room for
            self._checkpoint = None
            self.lose(1, "not_encodable", now_s)
            return
        before = self.bytes_total
        is_encoded = self._keep(record, now_s)
        self._checkpoint_bytes += self.bytes_total - before
        if not is_encoded:
            self._checkpoint = None
        elif isinstance(record, CheckpointEnded):
            self._checkpoint = None
            self.checkpoints_total += 1
            self.checkpoint_bytes = self._checkpoint_bytes

    def lose(self, count: int, reason: LossReason, now_s: float) -> None:
        """Count this many records as lost."""
        self.lost[reason] += count
        self.broken_by[reason] += count
        self._append(encode_record(Lost(now_s=now_s, count=count)), count)

    def cut(self) -> EncodedMessage:
        """Return a message of the oldest records, as many as fit."""
        records, size, first = list[bytes](), 0, self._next
        while self._encoded and size + len(self._encoded[0][0]) <= RECORD_BYTES_MAX:
            encoded, weight = self._encoded.popleft()
            records.append(encoded)
            size += len(encoded)
            self._next += weight
        self.waiting_bytes -= size
        return EncodedMessage(pack_journal(self._life, first, records), first, len(records))

    def _keep(self, record: Encodable, now_s: float) -> bool:
        """Return whether the record was added; one that cannot be encoded is lost: no record may end the process."""
        try:
            encoded = record if isinstance(record, bytes) else encode_record(record)
        except _NOT_ENCODABLE:
            self.lose(1, "not_encodable", now_s)
            return False
        if len(encoded) <= RECORD_BYTES_MAX:
            self._append(encoded, 1)
            return True
        try:
            parts = in_parts(encoded, now_s)
        except LimitExceeded:
            self.lose(1, "too_large", now_s)
            return False
        for part in parts:
            self._append(part, 1)
        return True

    def _append(self, encoded: bytes, weight: int) -> None:
        self._encoded.append((encoded, weight))
        self.waiting_bytes += len(encoded)
        self.bytes_total += len(encoded)
        self.records_total += 1
