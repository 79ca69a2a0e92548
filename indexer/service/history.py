"""The index as of a message of the log: restores the newest snapshot before it, then reads the log up to it.

    requested message                                         result
    -------------------------------------------------------   ---------------------------------------------
    at a snapshot's place, or after it without a gap in       the snapshot, and every message from there on
      the log between
    any, if the log still has its first message               every message from the first on
    anything else                                             `NotRetained`, which names the oldest available

Snapshots that are unreadable or of another log do not count. No questions are sent and no time passes: a rank with
missing batches stays at its last place without a gap, stale (resyncing), until the next snapshot or its next epoch. A
worker that left stays until a snapshot lacks it: the log of events does not contain departures.

    the rank                                              note
    ---------------------------------------------------   ----------------------------------------------------------
    is stale (resyncing)                                  the log lacks batches from its place on
    is at another place than the log's last batch of it   after that: the snapshot has an answer's batches, which the
                                                            log had not brought; before: it lacked batches of the log
    is at the beginning of an epoch                       the snapshot has the epoch from a heartbeat; the log has
                                                            nothing of it yet, and may still have older batches
    was stale in the snapshot (resyncing, overfull,       the log does not show when that ended
      source), and has the same epoch

Without a note a rank's state is exactly the fold of all messages up to that moment.
"""

import asyncio
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import structlog

from indexer.follow.checkpoint import Checkpoint, RankCheckpoint, decode_checkpoint
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import Received, read_message
from indexer.follow.status import FollowerStatistics
from indexer.service.retention import SnapshotName
from indexer.service.snapshots import UNREADABLE, read_snapshot
from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage, LogStreamState, ObjectBucket

_STALL_S = 10.0
"""Reading fails if no message comes for this long."""
_AHEAD_MAX = 64
"""At most this many messages wait to be folded in."""

_NOT_HEALED_BY_THE_LOG = ("resyncing", "overfull", "source")

NEWEST = "newest"

_log = structlog.get_logger("indexer")


class Moment(NamedTuple):
    """The fold after message `stream_seq`, which the log stored at `time_ns`; made from `start`, or the log alone."""

    fold: IndexFold
    stream_seq: int
    time_ns: int
    start: Checkpoint | None

    @property
    def snapshot(self) -> str:
        """The name of the snapshot that it was made from; empty: none."""
        return str(SnapshotName(self.start.stream_seq, self.start.wall_ns)) if self.start else ""

    @property
    def messages_read(self) -> int:
        """How many messages of the log it was made from."""
        return self.stream_seq - (self.start.stream_seq if self.start else 0)

    def notes(self) -> dict[WorkerRank, list[str]]:
        """Return the notes on each rank."""
        known = {each.rank: each for each in (self.start.ranks if self.start else ())}
        streams = self.fold.statistics().streams
        return {rank: _notes(stream, known.get(rank)) for rank, stream in streams.items()}


def _notes(stream: FollowerStatistics, checkpoint: RankCheckpoint | None) -> list[str]:
    notes = []
    if stream.stale == "resyncing":
        notes.append(f"behind seq {stream.cursor} the log has a hole, or bytes that cannot be read")
    elif stream.stale:
        notes.append(stream.stale)
    elif not stream.cursor:
        notes.append("the snapshot has this epoch from a heartbeat, and the log has no batch of it yet")
    elif stream.cursor > stream.logged_seq:
        ahead = stream.cursor - stream.logged_seq
        notes.append(f"ahead of the log by {ahead} batches, which the snapshot has from an answer")
    elif stream.cursor < stream.logged_seq:
        notes.append(f"the snapshot lacked {stream.logged_seq - stream.cursor} batches that the log had brought")
    if checkpoint is not None and checkpoint.stale in _NOT_HEALED_BY_THE_LOG and checkpoint.epoch == stream.epoch:
        notes.append(f"was stale in the snapshot: {checkpoint.stale}")
    return notes


class NotRetained(Exception):
    """The requested moment is not available; `oldest` is the oldest available one, if any."""

    def __init__(self, field: str, found: object, oldest: "AvailableMoment | None", last_seq: int) -> None:
        allowed, why = "none", "nothing is kept"
        if oldest is not None:
            oldest_time = time_text(oldest.time_ns)
            allowed = f"{oldest_time} and later" if field == "time" else f"{oldest.stream_seq}..{last_seq}"
            why = f"the oldest that is kept is message {oldest.stream_seq}, of {oldest_time}"
        super().__init__(f"{field}: found {found}, allowed {allowed}: {why}")
        self.field, self.found, self.oldest, self.last_seq = field, found, oldest, last_seq


class SnapshotUnknown(Exception):
    """The snapshot does not exist or cannot be read."""


class AvailableMoment(NamedTuple):
    """A message after which the index is available, and its time (the snapshot's, if the log dropped the message)."""

    stream_seq: int
    time_ns: int


async def seq_at(log: EventLog, time_ns: int) -> int:
    """Return the seq of the log's last message of that time or earlier.

    Raises:
        NotRetained: all messages of the log are later.
        BrokerUnavailable: the log is away.
    """
    stream = await log.stream_state(subjects.EVENTS_STREAM)
    seq = await log.seq_at(subjects.EVENTS_STREAM, time_ns)
    if seq < max(1, stream.first_seq):
        raise NotRetained("time", time_text(time_ns), await _Past(log, stream).oldest(), stream.last_seq)
    return seq


async def moment_at(log: EventLog, seq: int, fold: IndexFold) -> Moment:
    """Return the moment after message `seq` of the log; it is built in `fold`, which must be empty.

    Raises:
        NotRetained: it is not available.
        IndexFull: the index has no memory for it.
        BrokerUnavailable: the log is away, or dropped messages before they were read.
    """
    stream = await log.stream_state(subjects.EVENTS_STREAM)
    past = _Past(log, stream)
    start = await past.restore(seq, fold) if 1 <= seq <= stream.last_seq else None
    if start is None and not (stream.first_seq <= 1 <= seq <= stream.last_seq):
        raise NotRetained("seq", seq, await past.oldest(), stream.last_seq)
    after_seq = start.stream_seq if start else 0
    time_ns = await _fold_log(log, stream.created, fold, after_seq, seq)
    time_ns = time_ns or (await past.available(seq, start.wall_ns if start else 0)).time_ns
    return Moment(fold, seq, time_ns, start)


async def named_snapshot(log: EventLog, name: str, fold: IndexFold) -> Moment:
    """Return the moment of a snapshot, built in `fold`, which must be empty; `newest` is the one that covers most.

    Raises:
        SnapshotUnknown: there is none of that name, or it cannot be read.
        IndexFull: the index has no memory for it.
        BrokerUnavailable: the log is away.
    """
    bucket = log.objects(subjects.SNAPSHOT_BUCKET)
    names = await bucket.names()
    if name == NEWEST:
        stream = await log.stream_state(subjects.EVENTS_STREAM)
        checkpoint = await _Past(log, stream).restore(stream.last_seq, fold, needs_log=False)
    else:
        checkpoint = await _restore_named(bucket, name, fold) if name in names else None
    if checkpoint is None:
        raise SnapshotUnknown(f"snapshot: found {name}, allowed {', '.join([NEWEST, *names]) if names else 'none yet'}")
    return Moment(fold, checkpoint.stream_seq, checkpoint.wall_ns, checkpoint)


async def _restore_named(bucket: ObjectBucket, name: str, fold: IndexFold) -> Checkpoint:
    try:
        checkpoint = decode_checkpoint(await bucket.get(name))
        fold.restore(checkpoint, 0.0)
    except UNREADABLE as error:
        raise SnapshotUnknown(f"snapshot: found {name}, which cannot be read: {error}") from error
    return checkpoint


class _Past:
    """The log as far as it is retained (`stream` says which part is), and its snapshots."""

    def __init__(self, log: EventLog, stream: LogStreamState) -> None:
        self._event_log, self._stream = log, stream
        self._bucket: ObjectBucket = log.objects(subjects.SNAPSHOT_BUCKET)

    async def restore(self, seq: int, fold: IndexFold, *, needs_log: bool = True) -> Checkpoint | None:
        """Restore the fold from the newest usable snapshot at or before `seq`; return it, None if there is none.

        With `needs_log` a snapshot is usable only if the log has all messages between it and `seq`.
        """
        for name in reversed([name for name in await self._names() if name.stream_seq <= seq]):
            is_fit = name.stream_seq == seq or not needs_log or self._log_continues_from(name)
            if is_fit and (checkpoint := await self._read(name)) is not None:
                fold.restore(checkpoint, 0.0)
                return checkpoint
        return None

    async def oldest(self) -> AvailableMoment | None:
        """Return the oldest message from which on every moment is available; None if there is none."""
        if not self._stream.last_seq:
            return None
        if self._stream.first_seq <= 1:
            return AvailableMoment(1, self._stream.first_time_ns)
        for name in await self._names():
            if self._log_continues_from(name) and await self._read(name) is not None:
                return await self.available(name.stream_seq, name.wall_ns)
        return None

    async def available(self, seq: int, wall_ns: int) -> AvailableMoment:
        """Return the message with its time, or with `wall_ns` if the log has dropped it."""
        message = await self._event_log.message_from(subjects.EVENTS_STREAM, seq)
        return AvailableMoment(seq, wall_ns if message is None or message.stream_seq != seq else message.time_ns)

    def _log_continues_from(self, name: SnapshotName) -> bool:
        return self._stream.first_seq - 1 <= name.stream_seq <= self._stream.last_seq

    async def _names(self) -> list[SnapshotName]:
        """Return the names of our snapshots in ascending order of their places."""
        try:
            names = await self._bucket.names()
        except BrokerUnavailable as error:
            _log.warning("snapshots_not_read", reason=str(error))
            return []
        return sorted(name for name in map(SnapshotName.read, names) if name is not None)

    async def _read(self, name: SnapshotName) -> Checkpoint | None:
        try:
            checkpoint, _ = await read_snapshot(self._bucket, name)
        except UNREADABLE as error:
            _log.warning("snapshot_refused", name=str(name), reason=str(error))
            return None
        return checkpoint if checkpoint.stream_created == self._stream.created else None


async def _fold_log(log: EventLog, created: str, fold: IndexFold, after_seq: int, seq: int) -> int:
    """Fold in the messages after `after_seq` up to `seq`; return the time of the last one, 0 if there are none.

    Raises:
        BrokerUnavailable: one of them does not come.
    """
    stream, time_ns, number = subjects.EVENTS_STREAM, 0, after_seq
    if after_seq == seq:
        return 0
    messages = asyncio.Queue[LogMessage](_AHEAD_MAX)
    reading = await log.follow(stream, subjects.EVENTS_ALL, messages.put, after_seq=after_seq, created=created)
    try:
        for number in range(after_seq + 1, seq + 1):
            async with asyncio.timeout(_STALL_S):
                message = await messages.get()
            if message.stream_seq != number:
                came = f"message {number} was lost before it was read, {message.stream_seq} came"
                raise BrokerUnavailable(f"{stream}: {came}")
            time_ns = message.time_ns
            with suppress(MalformedMessage):  # the subject names no rank
                rank = subjects.rank_of(message.subject)
                try:
                    read = read_message(message.data)
                except MalformedMessage:
                    read = None
                fold.apply(Received(rank, read), 0.0)
    except TimeoutError:
        raise BrokerUnavailable(f"{stream}: nothing behind message {number - 1} in {_STALL_S:g} s") from None
    finally:
        await log.leave(reading)
    return time_ns


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS_MAX = 10**10
_FRACTION = re.compile("[.,]([0-9]{1,9})")


def time_text(time_ns: int) -> str:
    """Return a time, in nanoseconds since 1970, to the millisecond, as `2026-11-21T22:10:00.123Z`."""
    time = _EPOCH + timedelta(microseconds=time_ns // 1000)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_time(text: str, now_ns: int) -> int:
    """Parse a time: seconds before `now_ns`, or an ISO time.

    For a time in milliseconds, or in whole seconds, return the end of that millisecond or second, so that it includes
    every message shown with that time. Eight digits that are a date, like 20261121, are an ISO time.

    Raises:
        ValueError: the text is neither; the message says what is allowed.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return now_ns - round(_seconds_ago(text) * 1e9)
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
    found = _FRACTION.search(text)
    digits = found[1] if found else ""
    below_us, precision_ns = int(digits[6:].ljust(3, "0")), int(10 ** (9 - len(digits)))
    return since // timedelta(microseconds=1) * 1000 + below_us + precision_ns - 1


def _seconds_ago(text: str) -> float:
    try:
        if 0 <= (seconds := float(text)) <= _SECONDS_MAX:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"found {text!r}, allowed seconds ago, 0 or more, or an ISO time like 2026-11-21T22:10:00Z")
