"""Turns what was applied into numbered journal messages.

record         what was applied becomes records at once, each in parts if it is longer than a message. What waits is
               bounded: beyond that the oldest gives way, and is counted
a checkpoint   becomes records one by one, when it is its turn (`step`), so that its size blocks nothing
losses         `Lost` takes the numbers of lost records. `broken_by` has them until the next checkpoint
cut            the next message
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import structlog

from kv_protocol.checkpoint import CheckpointEnded
from kv_protocol.errors import LimitExceeded
from kv_protocol.journal import RECORD_BYTES_MAX, JournalRecord, Lost, encode_record, in_parts, pack_journal
from router.decision.verdict import Verdict
from router.journal.checkpoint import JournalCheckpoint
from router.journal.records import Recordable, RecordedStandings, shortened

RECORDS_MAX = 65_536
"""Records that wait for the log: what a busy router writes in some ten seconds; it does without the log for as long."""
_BYTES_MAX = 256 << 20
"""The same, of long prompts."""
_EARLY = 4
"""The part of what may wait at which a message is due."""
LossReason = Literal["buffer_full", "too_large", "not_encodable", "log_away"]
"""The buffer was full; a record took too many parts; it holds what msgpack has no room for; the log did not take it
before the router ended."""
LOSS_REASONS: tuple[LossReason, ...] = get_args(LossReason)
_NOT_ENCODABLE = (OverflowError, TypeError, ValueError)

_log = structlog.get_logger("router")


class EncodedMessage(NamedTuple):
    """A message, the number of its first record, and its number of records."""

    data: bytes
    first: int
    records: int


class _Loss(NamedTuple):
    """An encoded `Lost`, and how many records it stands for."""

    data: bytes
    count: int


class _Checkpoint(NamedTuple):
    """A checkpoint that waits for its turn."""

    records: Iterator[JournalRecord]


class JournalEncoder:
    """The records of one run that wait to be published."""

    def __init__(
        self,
        life: int,
        kv_seq: Callable[[], int] = lambda: 0,
        records_max: int = RECORDS_MAX,
        now_s: float = 0.0,
        on_waiting: Callable[[bool], None] = lambda _is_due: None,
    ) -> None:
        """`kv_seq` says how far the index has read `KV_EVENTS`.

        `on_waiting` is called when the first record comes, and with True when so many wait that a message is due.
        """
        self._life, self._kv_seq, self._on_waiting = life, kv_seq, on_waiting
        self._records_max, self._early = records_max, records_max // _EARLY
        self._standings = RecordedStandings()
        self._waiting = deque[bytes | _Loss | _Checkpoint]()
        self._front = deque[bytes | _Loss]()  # of the checkpoint: before what waits
        self._waiting_bytes = 0
        self._message = list[bytes]()
        self._message_bytes = self._message_numbers = 0
        self._next = 1
        self._checkpoint: Iterator[JournalRecord] | None = None
        self._checkpoint_bytes = 0
        self.is_checkpoint_waiting = False
        self.pushed_out = 0
        """Records that gave way, of which no message says so yet."""
        self.records_total = self.bytes_total = 0
        """What was put into messages."""
        self.checkpoints_total = 0
        self.checkpoint_bytes = 0
        """Of the last complete checkpoint."""
        self.checkpoint_at = now_s, 0, 0
        """When the last checkpoint ended, or this run began; `records_total` and `bytes_total` then."""
        self.lost: Counter[LossReason] = Counter()
        self.broken_by: Counter[LossReason] = Counter()
        """Losses since the last checkpoint: replay is not exact until the next."""

    def __len__(self) -> int:
        return len(self._message) + len(self._front) + len(self._waiting)

    @property
    def is_in_checkpoint(self) -> bool:
        """Whether a checkpoint is being encoded."""
        return self._checkpoint is not None

    # ------------------------------------------------------------------------------------------------- what is added

    def record(self, what: Recordable) -> None:
        """Add the records of `what`. Of what cannot be encoded the loss is recorded: no record may end the process."""
        count = len(self._waiting)
        if not count or count >= self._early or self._waiting_bytes >= _BYTES_MAX:
            self._on_waiting(count >= self._early)
            self._make_room()
        try:
            if type(what) is Verdict:
                if self._standings.may_differ(what):
                    for standing in self._standings.changed(what):
                        self._add(encode_record(standing))
                encoded = what.journal_record(self._kv_seq())
            elif isinstance(what, JournalCheckpoint):
                self.is_checkpoint_waiting = True
                self._waiting.append(_Checkpoint(self._standings.checkpoint(what)))
                return
            else:
                encoded = encode_record(shortened(what))
        except _NOT_ENCODABLE:
            self._lose("not_encodable", what.now_s)
            return
        if len(encoded) <= RECORD_BYTES_MAX:
            self._add(encoded)
            return
        try:
            parts = in_parts(encoded, what.now_s)
        except LimitExceeded:
            self._lose("too_large", what.now_s)
            return
        for part in parts:
            self._add(part)

    def _add(self, encoded: bytes) -> None:
        self._waiting.append(encoded)
        self._waiting_bytes += len(encoded)

    def _make_room(self) -> None:
        while len(self._waiting) >= self._records_max or self._waiting_bytes >= _BYTES_MAX:
            if not self.pushed_out:
                _log.warning("journal_buffer_full", records=len(self._waiting), bytes=self._waiting_bytes)
            oldest = self._waiting.popleft()
            if isinstance(oldest, _Checkpoint):
                self.is_checkpoint_waiting = False
            else:
                self._waiting_bytes -= len(_data_of(oldest))
            self.pushed_out += oldest.count if isinstance(oldest, _Loss) else 1

    def _lose(self, reason: LossReason, now_s: float) -> None:
        loss = self._loss(1, reason, now_s)
        self._waiting.append(loss)
        self._waiting_bytes += len(loss.data)

    def _loss(self, count: int, reason: LossReason, now_s: float) -> _Loss:
        self.lost[reason] += count
        self.broken_by[reason] += count
        return _Loss(encode_record(Lost(now_s=now_s, count=count)), count)

    # ------------------------------------------------------------------------------------------------- messages

    def cut(self, now_s: float = 0.0) -> EncodedMessage:
        """Return a message of the oldest records, as many as fit."""
        while not self.step(now_s):
            pass
        first, records = self._next, self._message
        self._next += self._message_numbers
        self._message, self._message_bytes, self._message_numbers = [], 0, 0
        return EncodedMessage(pack_journal(self._life, first, records), first, len(records))

    def step(self, now_s: float) -> bool:
        """Put what waits into the next message, of a checkpoint one record; return whether the message is complete."""
        if self._checkpoint is not None:
            if not self._front:
                self._go_on(self._checkpoint, now_s)
        elif self.pushed_out:
            self._front.append(self._loss(self.pushed_out, "buffer_full", now_s))
            self.pushed_out = 0
        while self._front:
            if not self._put(self._front[0]):
                return True
            self._front.popleft()
        while self._checkpoint is None and self._waiting:
            each = self._waiting[0]
            if isinstance(each, _Checkpoint):
                self._checkpoint, self._checkpoint_bytes = each.records, 0
                self.is_checkpoint_waiting = False
                if self.broken_by:
                    _log.warning("journal_records_lost", records=self.broken_by.total(), reasons=dict(self.broken_by))
                self.broken_by.clear()
            elif self._put(each):
                self._waiting_bytes -= len(_data_of(each))
            else:
                return True
            self._waiting.popleft()
        return self._checkpoint is None

    def _put(self, what: bytes | _Loss) -> bool:
        """Put a record into the message; return whether it fitted."""
        data = _data_of(what)
        if self._message_bytes + len(data) > RECORD_BYTES_MAX:
            return False
        self._message.append(data)
        self._message_bytes += len(data)
        self._message_numbers += what.count if isinstance(what, _Loss) else 1
        self.records_total += 1
        self.bytes_total += len(data)
        return True

    def _go_on(self, checkpoint: Iterator[JournalRecord], now_s: float) -> None:
        """Encode the next record of the checkpoint."""
        try:
            record = next(checkpoint)
            parts = in_parts(encode_record(record), now_s)
        except _NOT_ENCODABLE:  # a row that msgpack has no room for
            self._front.append(self._loss(1, "not_encodable", now_s))
            self._checkpoint = None
            return
        self._front += parts
        size = sum(map(len, parts))
        self._checkpoint_bytes += size
        if isinstance(record, CheckpointEnded):
            self._checkpoint = None
            self.checkpoints_total += 1
            self.checkpoint_bytes = self._checkpoint_bytes
            self.checkpoint_at = now_s, self.records_total + len(parts), self.bytes_total + size


def _data_of(what: bytes | _Loss) -> bytes:
    return what if isinstance(what, bytes) else what.data
