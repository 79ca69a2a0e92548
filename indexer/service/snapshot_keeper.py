"""Writes snapshots of an index periodically and keeps the log within its bounds, by the plan of `retention.py`.

    no check       while the log is away, is another one, or the index is still catching up
    no write       while a rank is off the log (an answer or a restart is ahead of it, or batches of it wait), for
                   `OFF_S` at most: a fold from such a place would differ
    never purged   messages that are covered by no snapshot that this process has read back

Several indexes may keep one log: each sees the snapshots of the others and writes only if one is due. Two writes at the
same time are harmless. An index that is behind a purge finds gaps and requests dumps.
"""

import asyncio

import msgspec
import structlog

from indexer.follow.fold import IndexFold
from indexer.service import retention as keeping
from indexer.service.feed import IndexFeed
from indexer.service.retention import KeepingLimits, LogExtent, SnapshotName
from indexer.service.snapshot_store import UNREADABLE, SnapshotDiffers, SnapshotStore, SnapshotTooLarge, extent_of
from kv_protocol import subjects
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import until

LOOK_S = 5.0
OFF_S = 60.0
_FAILURES = (BrokerUnavailable, SnapshotDiffers, SnapshotTooLarge, *UNREADABLE)

_log = structlog.get_logger("indexer")


class KeeperStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, and the state at the last check. An age of None: there is no snapshot, or no check yet."""

    written_total: int
    failures_total: int
    refused_total: int
    newest_bytes: int
    newest_age_s: float | None
    newest_seq: int
    purged_seq: int
    log_bytes: int


class SnapshotKeeper:
    """A part of a process."""

    def __init__(
        self,
        fold: IndexFold,
        feed: IndexFeed,
        snapshots: SnapshotStore,
        log: EventLog,
        clock: Clock,
        limits: KeepingLimits,
    ) -> None:
        self._fold, self._feed, self._snapshots = fold, feed, snapshots
        self._event_log, self._clock, self._limits = log, clock, limits
        self._off_since_s: float | None = None
        self._logged_failure = ""
        self._failures = 0
        self._newest: SnapshotName | None = None
        self._purged_seq = 0
        self._log_bytes = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Check and do what is due, until `stop` is set."""
        while not stop.is_set():
            if self._event_log.is_connected and not self._feed.catching_up():
                await until(stop, self.check())
            await self._clock.wait(stop, LOOK_S)

    def statistics(self) -> KeeperStatistics:
        """Return the figures for metrics."""
        newest = self._newest
        return KeeperStatistics(
            written_total=self._snapshots.written_total,
            failures_total=self._failures,
            refused_total=self._snapshots.refused_total,
            newest_bytes=self._snapshots.newest_bytes,
            newest_age_s=(self._clock.wall_ns() - newest.wall_ns) / 1e9 if newest else None,
            newest_seq=newest.stream_seq if newest else 0,
            purged_seq=self._purged_seq,
            log_bytes=self._log_bytes,
        )

    async def check(self) -> None:
        """Do what is due now; a failure is counted, and logged when its reason changes."""
        try:
            await self._keep()
        except _FAILURES as error:
            self._failures += 1
            if (reason := str(error)) != self._logged_failure:
                self._logged_failure = reason
                _log.warning("snapshot_failed", reason=reason)

    async def _keep(self) -> None:
        stream = await self._event_log.stream_state(subjects.EVENTS_STREAM)
        if stream.created != self._feed.log_position.created:
            return
        log, names = extent_of(stream), await self._snapshots.names()
        verified, others = self._snapshots.verified(stream.created), self._snapshots.others(stream.created)
        self._log_bytes, self._newest = stream.bytes, next(iter(keeping.of_this_log(log, names, others)), None)
        now_ns = self._clock.wall_ns()
        plan = keeping.plan(log, names, now_ns, self._limits, verified=verified, others=others)
        if plan.write and not self._is_off_log():
            await self._write(log, names)
        if plan.purge_up_to:
            await self._purge(plan.purge_up_to)
        for name in plan.delete:
            await self._snapshots.delete(name)

    def _is_off_log(self) -> bool:
        """Whether a snapshot should wait until every rank is at the log's place."""
        now_s = self._clock.now()
        if not self._fold.off_log():
            self._off_since_s = None
            return False
        self._off_since_s = now_s if self._off_since_s is None else self._off_since_s
        return now_s - self._off_since_s < OFF_S

    async def _write(self, log: LogExtent, names: list[str]) -> None:
        position = self._feed.log_position
        if self._newest is not None and position.stream_seq <= self._newest.stream_seq:
            return  # another index has written a newer one
        checkpoint = self._fold.checkpoint(position.created, position.stream_seq, self._clock.wall_ns())
        name = await self._snapshots.write(checkpoint, log, names)
        self._newest, self._logged_failure = SnapshotName.read(name), ""
        _log.info("snapshot_written", name=name, bytes=self._snapshots.newest_bytes)
        await self._snapshots.delete_unfinished(self._clock.wall_ns())

    async def _purge(self, up_to_seq: int) -> None:
        await self._event_log.purge(subjects.EVENTS_STREAM, up_to_seq)
        self._purged_seq = up_to_seq
        _log.info("log_purged", up_to_seq=up_to_seq)
