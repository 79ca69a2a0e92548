"""Writes an index's snapshots to their bucket when due, reads them back, restores them; keeps the log in its bounds.

    written        put, read back, and compared; only then does a snapshot cover messages that may be purged
    restored       the best snapshot that decodes, covers the place in its name, is of the present stream, and fits into
                   the index; others are logged and counted, and the next is tried
    no check       while the log is away, or is another than the index follows, or the index is still catching up
    no write       while a rank is off the log (its place comes from an answer or a restart, or it wants an answer), for
                   `OFF_S` at most: a fold of the log up to that place would differ
    never purged   messages that are covered by no snapshot that this process has read back

`retention.py` decides what is due. Several indexes of one log may share the bucket: each sees the snapshots of the
others and writes only if one is due. Two writes at the same time are harmless. An index that still needs purged
messages finds gaps and requests dumps.
"""

import asyncio
import math
from collections.abc import Collection, Iterable

import msgspec
import structlog
from msgspec.structs import replace

from indexer.follow.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from indexer.follow.fold import IndexFold
from indexer.index.prefix_index import IndexFull
from indexer.service.feed import IndexFeed, LogPosition
from indexer.service.retention import KeepingLimits, LogExtent, Retention, SnapshotName
from kv_protocol import subjects
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogStreamState, NoSuchObject, ObjectBucket, ObjectDamaged
from kv_runtime.supervise import until

LOOK_S = 5.0
OFF_S = 60.0
_STORED_RATIO = 1.01
"""Each byte of an object takes at most this many on disk; small objects take more, but do not matter."""
_UNFINISHED_S = 3600.0
"""A put that is unfinished after this time counts as abandoned: it is deleted."""

_log = structlog.get_logger("indexer")


class SnapshotUnfit(Exception):
    """The snapshot is not the one of its name, or two of its size do not fit into the bucket."""


UNREADABLE = (NoSuchObject, ObjectDamaged, MalformedMessage, LimitExceeded, SnapshotUnfit)


class SnapshotStatistics(msgspec.Struct, kw_only=True):
    """Counts, and the state at the last check. An age of None: there is no snapshot, or no check yet."""

    written_total: int = 0
    failures_total: int = 0
    refused_total: int = 0
    """Snapshots that could not be used."""
    newest_bytes: int = 0
    """Size of the snapshot that was written or read last."""
    newest_age_s: float | None = None
    newest_seq: int = 0
    purged_seq: int = 0
    log_bytes: int = 0


async def read_snapshot(bucket: ObjectBucket, name: SnapshotName) -> tuple[Checkpoint, int]:
    """Return the checkpoint under a name, and its size in bytes.

    Raises:
        BrokerUnavailable: the log is away.
        UNREADABLE: one of these errors: there is none, it is damaged, or it covers another place than its name says.
    """
    data = await bucket.get(str(name))
    checkpoint = decode_checkpoint(data)
    if checkpoint.stream_seq != name.stream_seq:
        raise SnapshotUnfit(f"stream_seq: found {checkpoint.stream_seq}, allowed {name.stream_seq}")
    return checkpoint, len(data)


class Snapshots:
    """The snapshots of one index. `bytes_max` is the bucket's size."""

    def __init__(self, fold: IndexFold, log: EventLog, clock: Clock, limits: KeepingLimits, bytes_max: int) -> None:
        self._fold, self._event_log, self._clock = fold, log, clock
        self._limits, self._bytes_max = limits, bytes_max
        self._bucket = log.objects(subjects.SNAPSHOT_BUCKET)
        self._covered: dict[str, str] = {}
        """Snapshots written or read here: name -> creation time of the covered stream."""
        self._off_since_s: float | None = None
        self._logged_failure = ""
        self._newest: SnapshotName | None = None
        self._statistics = SnapshotStatistics()

    def statistics(self) -> SnapshotStatistics:
        """Return the figures for metrics."""
        newest = self._newest
        age_s = (self._clock.wall_ns() - newest.wall_ns) / 1e9 if newest else None
        return replace(self._statistics, newest_age_s=age_s, newest_seq=newest.stream_seq if newest else 0)

    # ---------------------------------------------------------------------------------------------- at the start

    async def restore(self, stream: LogStreamState) -> int:
        """Restore the fold from the best snapshot of the stream; return the place it covers, 0 if there is none."""
        try:
            for name in (await self._retention(stream)).of_this_log:
                if covered := await self._restore(name, stream.created):
                    return covered
        except BrokerUnavailable as error:
            _log.warning("snapshots_not_read", reason=str(error))
        return 0

    async def _restore(self, covers: SnapshotName, created: str) -> int:
        name = str(covers)
        try:
            checkpoint, size = await read_snapshot(self._bucket, covers)
            self._covered[name] = checkpoint.stream_created
            if checkpoint.stream_created != created:
                _log.info("snapshot_of_another_log", name=name)
                return 0
            self._fold.restore(checkpoint, self._clock.now())
        except (*UNREADABLE, IndexFull) as error:
            self._covered.pop(name, None)
            self._statistics.refused_total += 1
            _log.warning("snapshot_refused", name=name, reason=str(error))
            return 0
        self._statistics.newest_bytes = size
        _log.info("snapshot_restored", name=name, stream_seq=checkpoint.stream_seq, ranks=len(checkpoint.ranks))
        return checkpoint.stream_seq

    # ---------------------------------------------------------------------------------------------- from time to time

    async def run(self, feed: IndexFeed, stop: asyncio.Event) -> None:
        """Check and do what is due, until `stop` is set; `feed` feeds the fold."""
        while not stop.is_set():
            if self._event_log.is_connected and not feed.catching_up():
                await until(stop, self.check(feed))
            await self._clock.wait(stop, LOOK_S)

    async def check(self, feed: IndexFeed) -> None:
        """Do what is due now; a failure is counted, and logged when its reason changes."""
        try:
            await self._keep(feed)
        except (BrokerUnavailable, *UNREADABLE) as error:
            self._statistics.failures_total += 1
            if (reason := str(error)) != self._logged_failure:
                self._logged_failure = reason
                _log.warning("snapshot_failed", reason=reason)

    async def _keep(self, feed: IndexFeed) -> None:
        stream = await self._event_log.stream_state(subjects.EVENTS_STREAM)
        if stream.created != feed.log_position.created:
            return
        verified = [name for name, covered in self._covered.items() if covered == stream.created]
        retention = await self._retention(stream, self._covered.keys() - verified)
        self._newest = next(iter(retention.of_this_log), None)
        self._statistics.log_bytes = stream.bytes
        if retention.is_due(self._clock.wall_ns()) and not self._is_off_log():
            position = feed.log_position
            if self._newest is None or position.stream_seq > self._newest.stream_seq:  # no other index wrote this one
                await self.write(position, retention.to_give_up())
        if up_to_seq := retention.purge_up_to(verified):
            await self._event_log.purge(subjects.EVENTS_STREAM, up_to_seq)
            self._statistics.purged_seq = up_to_seq
            _log.info("log_purged", up_to_seq=up_to_seq)
        for name in retention.useless():
            await self._delete(name)

    async def _retention(self, stream: LogStreamState, others: Collection[str] = ()) -> Retention:
        extent = LogExtent(stream.first_seq, stream.last_seq, stream.bytes)
        return Retention(extent, await self._bucket.names(), self._limits, others)

    def _is_off_log(self) -> bool:
        """Whether a snapshot should wait until every rank is at the log's place."""
        now_s = self._clock.now()
        if not self._fold.off_log():
            self._off_since_s = None
            return False
        self._off_since_s = now_s if self._off_since_s is None else self._off_since_s
        return now_s - self._off_since_s < OFF_S

    async def write(self, position: LogPosition, may_go: Iterable[str] = ()) -> None:
        """Write the fold as of `position`, and read it back; delete snapshots of `may_go` if space is needed.

        Raises:
            BrokerUnavailable: it could not be written (for lack of space, say) or read back.
            SnapshotUnfit: the bucket is too small, or reading it back gave something else.
            NoSuchObject, ObjectDamaged: it could not be read back.
        """
        wall_ns = self._clock.wall_ns()
        covers = SnapshotName(position.stream_seq, wall_ns)
        name, data = str(covers), encode_checkpoint(self._fold.checkpoint(*position, wall_ns))
        await self._free_space(len(data), may_go)
        await self._bucket.put(name, data)
        if await self._bucket.get(name) != data:
            raise SnapshotUnfit(f"snapshot {name}")
        self._covered[name] = position.created
        self._newest, self._logged_failure = covers, ""
        self._statistics.written_total += 1
        self._statistics.newest_bytes = len(data)
        _log.info("snapshot_written", name=name, bytes=len(data))
        if deleted := await self._bucket.delete_unfinished(self._clock.wall_ns(), _UNFINISHED_S):
            _log.info("unfinished_snapshots_removed", count=deleted)

    async def _free_space(self, data_bytes: int, may_go: Iterable[str]) -> None:
        needed = math.ceil(data_bytes * _STORED_RATIO)
        if 2 * needed > self._bytes_max:
            raise SnapshotUnfit(f"nats.snapshots_bytes_max: found {self._bytes_max}, allowed {2 * needed} and more")
        for name in may_go:
            if await self._bucket.size_bytes() + needed <= self._bytes_max:
                return
            _log.warning("snapshot_given_up", name=name, snapshots_bytes_max=self._bytes_max)
            await self._delete(name)

    async def _delete(self, name: str) -> None:
        await self._bucket.delete(name)
        self._covered.pop(name, None)
