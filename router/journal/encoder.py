"""Turns what was applied to a router's state into numbered journal messages.

journal        holds the newest records. Leases add decisions, first tokens and outcomes (`router/native/leases.cpp`);
               `record` adds anything else. A record that is longer than a message becomes parts
a batch        the records of one message. If batches of more than `bytes_max` wait, the oldest are dropped and counted
a decision     is preceded by a `RankStanding` of each rank with another epoch or doubt than recorded last; before the
               first record of a rank these count as 0 and none. A verdict has the rank's trust, and `doubt_of` returns
               the doubt behind it
a checkpoint   `CheckpointBegan`, `RankStanding`s, `CheckpointPart`s, `CheckpointEnded`. `step` encodes one of these
               records, so that a large checkpoint does not block the process
losses         a record `Lost` takes the numbers of the lost records; `broken_by` counts these until the next checkpoint
cut            returns the next message

`JournalCheckpoint` copies a state at one moment, `Restoring` restores it from the parts. The table `fleet` has the
policy, the fleet and the breakers; all others are the core's (`router/native/core.cpp`), which encodes leases and
routed blocks only when read. Tables are restored in their order: a lease needs its rank and its session. No table has
what can be computed from the others: views, columns, chains.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    RECORD_BYTES_MAX,
    CheckpointBegan,
    CheckpointEnded,
    CheckpointPart,
    JournalRecord,
    Lost,
    RankStanding,
    encode_record,
    in_parts,
    pack_journal,
)
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.state import RouterState, StateSettings
from router.decision.verdict import Verdict
from router.fleet.breakers import Breaker, BreakerStatistics
from router.fleet.registry import Worker
from router.fleet.trust import doubt_of
from router.native import built

_FLEET = "fleet"
"""The table that is not the core's."""
BYTES_MAX = 128 << 20
"""Bytes of records that may wait for the log: twice those of the longest record (`RECORD_PARTS_MAX`)."""
_MESSAGES_MIN = 4
"""A full buffer has at least this many messages: dropping the oldest one loses only a part of it."""
LossReason = Literal["buffer_full", "too_large", "not_encodable", "log_away"]
"""The buffer was full; a record took too many parts, or has a value that msgpack cannot encode; the log did not take
it before the router ended."""
LOSS_REASONS: tuple[LossReason, ...] = get_args(LossReason)
_NOT_ENCODABLE = (OverflowError, TypeError, ValueError)
UNHEARD = (0, "")
"""The epoch and doubt of a rank without a `RankStanding`: 0, and no doubt."""


class CheckpointUnusable(Exception):
    """The checkpoint cannot be restored: it is incomplete, or of another version."""


class _Fleet(msgspec.Struct, frozen=True, array_like=True):
    """The state that is not the core's."""

    policy: Policy
    totals: tuple[bool, int]
    """`is_log_connected` and `refused_total` of the fleet."""
    workers: list[Worker]
    breaker_totals: BreakerStatistics
    breakers: list[Breaker]


class JournalCheckpoint:
    """The state at the moment of creation, with the passing of time applied until `began.now_s`."""

    def __init__(self, state: RouterState, began: CheckpointBegan) -> None:
        state.apply(began)
        self.began = began
        fleet, breakers, workers = state.fleet, state.breakers, list(state.fleet.workers())
        self.worker_ids = frozenset(worker.registration.worker_id for worker in workers)
        totals = fleet.is_log_connected, fleet.refused_total
        row = _Fleet(state.policy, totals, workers, breakers.statistics, [*breakers.by_key.values()])
        core = state.core.checkpoint()
        self._parts = chain([(_FLEET, msgspec.msgpack.encode([row]))], iter(core.next, None))

    def parts(self) -> Iterator[CheckpointPart | CheckpointEnded]:
        """Yield the parts, at least one per table, and the end. Only once: rows are made as they are read."""
        count = 0
        for table, rows in self._parts:
            count += 1
            yield CheckpointPart(now_s=self.began.now_s, table=table, rows=rows)
        yield CheckpointEnded(now_s=self.began.now_s, parts=count)


class Restoring:
    """A state that is being restored from a checkpoint's parts."""

    def __init__(self, began: CheckpointBegan, modes: Mapping[str, Mode]) -> None:
        self._state = RouterState(msgspec.convert(began.settings, StateSettings), modes)
        self._tables = {_FLEET, *self._state.core.tables}
        self._missing = self._tables.copy()
        self._parts = 0

    def add(self, part: CheckpointPart) -> None:
        """Add the rows of the part to the state.

        Raises:
            CheckpointUnusable: they are of another version.
        """
        if part.table not in self._tables:
            raise CheckpointUnusable(f"table {part.table} is not known here")
        try:
            if part.table == _FLEET:
                for row in msgspec.msgpack.decode(part.rows, type=list[_Fleet]):
                    self._restore(row)
            else:
                self._state.core.restore(part.table, msgspec.msgpack.decode(part.rows, type=list[Any]))
        except UNDECODABLE as error:
            raise CheckpointUnusable(f"table {part.table}: {error!r}") from error
        self._missing.discard(part.table)
        self._parts += 1

    def _restore(self, row: _Fleet) -> None:
        state = self._state
        state.policy, state.breakers.statistics = row.policy, row.breaker_totals
        state.fleet.is_log_connected, state.fleet.refused_total = row.totals
        for worker in row.workers:
            state.fleet.restore(worker)
            state.show_worker(worker.registration.worker_id)
        for breaker in row.breakers:
            state.breakers.restore(breaker)

    def completed(self, ended: CheckpointEnded) -> RouterState:
        """Return the state.

        Raises:
            CheckpointUnusable: parts or tables are missing.
        """
        if self._parts != ended.parts:
            raise CheckpointUnusable(f"{self._parts} of {ended.parts} parts")
        if self._missing:
            raise CheckpointUnusable(f"without the tables {', '.join(sorted(self._missing))}")
        return self._state


class EncodedMessage(NamedTuple):
    """A message, the number of its first record, and its number of records."""

    data: bytes
    first: int
    records: int


class _Batch(NamedTuple):
    """The joined records of one message, their count, and how many numbers they take (a `Lost` takes many)."""

    records: bytes
    size: int
    numbers: int


class JournalEncoder:
    """The records of one run that wait to be published."""

    def __init__(
        self,
        life: int,
        kv_seq: Callable[[], int] = lambda: 0,
        bytes_max: int = BYTES_MAX,
        now_s: float = 0.0,
        on_full: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        """`kv_seq` returns how far the index has read `KV_EVENTS`.

        `on_full` is called when the first record is dropped, with the number of bytes that wait.
        """
        self._life, self._on_full = life, on_full
        self._bytes_max = bytes_max
        batch_bytes_max = min(RECORD_BYTES_MAX, bytes_max // _MESSAGES_MIN)
        self.journal = built.Journal(self, kv_seq, encode_record, RECORD_BYTES_MAX, batch_bytes_max)
        self._waiting = deque[_Batch | Iterator[JournalRecord]]()
        """Batches and, in their order among them, checkpoints as iterators of records."""
        self._statuses = dict[WorkerRank, tuple[int, str]]()
        """The epoch and the doubt of each rank, as recorded last."""
        self._is_encoding = False
        """Whether a checkpoint was begun, and its last batch is not cut."""
        self._dropped = 0
        """Dropped records that no message has reported yet, as `Lost`."""
        self._next = 1
        self._now_s = now_s
        self.records_total = self.bytes_total = 0
        """Records and their bytes in the messages that were cut."""
        self.checkpoints_total = 0
        self.checkpoint_bytes = 0
        """Size of the last complete checkpoint."""
        self.checkpoint_at = now_s, 0, 0
        """When the last checkpoint ended, or this run began; `records_total` and `bytes_total` then."""
        self.lost: Counter[LossReason] = Counter()
        self.broken_by: Counter[LossReason] = Counter()
        """Losses after the newest checkpoint that was taken: replay is not exact until the next one."""
        self._steps = self._batches_in_order()

    def __len__(self) -> int:
        return sum(each.size for each in self._batches()) + self.journal.records

    def _batches(self) -> Iterator[_Batch]:
        return (each for each in self._waiting if isinstance(each, _Batch))

    @property
    def is_in_checkpoint(self) -> bool:
        """Whether a checkpoint waits for its turn, or is being encoded."""
        return self._is_encoding or not all(isinstance(each, _Batch) for each in self._waiting)

    @property
    def has_message(self) -> bool:
        """Whether a batch or a checkpoint waits."""
        return bool(self._waiting or self._is_encoding)

    # ------------------------------------------------------------------------------------------------- what is added

    def record(self, what: JournalRecord | JournalCheckpoint) -> None:
        """Add the records of `what`. If it cannot be encoded its loss is recorded: no record may end the process."""
        if isinstance(what, JournalCheckpoint):
            self.journal.complete()
            self.journal.forget_seen()
            workers, now_s = what.worker_ids, what.began.now_s
            self._statuses = {rank: known for rank, known in self._statuses.items() if rank.worker_id in workers}
            standings = [_standing(now_s, rank, *status) for rank, status in self._statuses.items()]
            self._waiting.append(chain((what.began,), standings, what.parts()))
            self.broken_by.clear()
            return
        try:
            self.write(encode_record(what), what.now_s)
        except _NOT_ENCODABLE:
            self.write_loss(what.now_s)

    def write(self, encoded: bytes, now_s: float) -> None:
        """Add a record of any length."""
        try:
            parts = in_parts(encoded, now_s)
        except LimitExceeded:
            parts = (self._loss("too_large", now_s),)
        for part in parts:
            self.journal.put(part)

    def write_loss(self, now_s: float) -> None:
        """Add the loss of a record that could not be encoded."""
        self.journal.put(self._loss("not_encodable", now_s))

    def write_standings(self, verdict: Verdict) -> None:
        """Add the standing of each rank whose epoch or doubt is new in this decision."""
        epochs = verdict.epochs or (0,) * len(verdict.ranks)
        for rank, epoch, trust in zip(verdict.ranks, epochs, verdict.trusts, strict=True):
            known = self._statuses.get(rank, UNHEARD)
            status = epoch, doubt_of(trust, known[1])
            if status != known:
                self._statuses[rank] = status
                self.journal.put(encode_record(_standing(verdict.now_s, rank, *status)))

    def add_batch(self, records: bytes, count: int) -> None:
        """Add a batch of the journal. If too many bytes wait, drop the oldest batches, and checkpoints before them."""
        self._waiting.append(_Batch(records, count, count))
        dropped = 0
        while self._waiting and sum(len(each.records) for each in self._batches()) > self._bytes_max:
            oldest = self._waiting.popleft()
            dropped += oldest.size if isinstance(oldest, _Batch) else 0
        if dropped:
            if not self._dropped:
                self._on_full(sum(len(each.records) for each in self._batches()))
            self._dropped += dropped
            self._count_lost("buffer_full", dropped)

    def _loss(self, reason: LossReason, now_s: float) -> bytes:
        self._count_lost(reason, 1)
        return encode_record(Lost(now_s=now_s, count=1))

    def _count_lost(self, reason: LossReason, count: int) -> None:
        self.lost[reason] += count
        self.broken_by[reason] += count

    # ------------------------------------------------------------------------------------------------- messages

    def cut(self, now_s: float = 0.0) -> EncodedMessage:
        """Return a message of the oldest records."""
        while (message := self.step(now_s)) is None:
            pass
        return message

    def step(self, now_s: float) -> EncodedMessage | None:
        """Return a message of the oldest records; None: only one record of a checkpoint was encoded, call again."""
        self._now_s = now_s
        if (batch := next(self._steps)) is None:
            return None
        first = self._next
        self._next += batch.numbers
        self.records_total += batch.size
        self.bytes_total += len(batch.records)
        return EncodedMessage(pack_journal(self._life, first, batch.size, batch.records), first, batch.size)

    def _batches_in_order(self) -> Iterator[_Batch | None]:
        """Yield a batch at each step, or None after each record of a checkpoint; never end."""
        while True:
            if self._dropped:
                count, self._dropped = self._dropped, 0
                yield _Batch(encode_record(Lost(now_s=self._now_s, count=count)), 1, count)
            if not self._waiting:
                self.journal.complete()
            oldest = self._waiting.popleft() if self._waiting else _Batch(b"", 0, 0)
            if isinstance(oldest, _Batch):
                yield oldest
            else:
                yield from self._encoded(oldest)

    def _encoded(self, checkpoint: Iterator[JournalRecord]) -> Iterator[_Batch | None]:
        """Yield the checkpoint's batches, and None after each of its records."""
        self._is_encoding = True
        encoded, size, from_bytes = bytearray(), 0, self.bytes_total
        try:
            for record in checkpoint:
                for part in in_parts(encode_record(record), self._now_s):
                    if len(encoded) + len(part) > RECORD_BYTES_MAX:
                        yield _Batch(bytes(encoded), size, size)
                        encoded, size = bytearray(), 0
                    encoded += part
                    size += 1
                yield None
        except (LimitExceeded, *_NOT_ENCODABLE) as error:  # a row is too long, or msgpack cannot encode it
            yield _Batch(bytes(encoded), size, size)
            reason: LossReason = "too_large" if isinstance(error, LimitExceeded) else "not_encodable"
            encoded, size = bytearray(self._loss(reason, self._now_s)), 1
        else:
            bytes_ = self.bytes_total + len(encoded)
            self.checkpoints_total += 1
            self.checkpoint_bytes = bytes_ - from_bytes
            self.checkpoint_at = self._now_s, self.records_total + size, bytes_
        self._is_encoding = False
        yield _Batch(bytes(encoded), size, size)


def _standing(now_s: float, rank: WorkerRank, epoch: int, doubt: str) -> RankStanding:
    return RankStanding(now_s=now_s, worker_id=rank.worker_id, dp_rank=rank.dp_rank, epoch=epoch, doubt=doubt)
