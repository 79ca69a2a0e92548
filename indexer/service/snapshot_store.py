"""Writes snapshots to their bucket and reads them back.

    written     put, read back, and compared; only then is the name `verified`
    restored    the best snapshot that decodes, covers the place in its name, is of the present stream, and fits into
                the index; others are logged and counted, and the next is tried

Other indexes of the same log write into the same bucket.
"""

import math
from collections.abc import Callable, Iterable

import structlog

from indexer.follow.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from indexer.index.prefix_index import IndexFull
from indexer.service import retention as keeping
from indexer.service.retention import LogExtent, SnapshotName
from kv_protocol import subjects
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogStreamState, NoSuchObject, ObjectDamaged

UNREADABLE = (NoSuchObject, ObjectDamaged, MalformedMessage, LimitExceeded)
_STORED_RATIO = 1.01
"""Upper bound of an object's bytes on disk by its own bytes; small objects take more and do not matter."""
_UNFINISHED_S = 3600.0
"""A put that is unfinished after this time is abandoned."""

_log = structlog.get_logger("indexer")


class SnapshotDiffers(Exception):
    """The snapshot that was read is not the one written under that name."""


class SnapshotTooLarge(Exception):
    """Two snapshots of this size do not fit into the bucket; the old ones stay."""


def extent_of(stream: LogStreamState) -> LogExtent:
    """Return the log's extent, as a plan needs it."""
    return LogExtent(stream.first_seq, stream.last_seq, stream.bytes)


class SnapshotStore:
    """The snapshots of one index."""

    def __init__(self, log: EventLog, bytes_max: int) -> None:
        self._bucket = log.objects(subjects.SNAPSHOT_BUCKET)
        self._bytes_max = bytes_max
        self._covered: dict[str, str] = {}
        """Snapshots written or read here: name -> creation time of the covered stream."""
        self.written_total = 0
        self.refused_total = 0
        """Snapshots that could not be used."""
        self.newest_bytes = 0
        """Size of the snapshot that was written or read last."""

    async def names(self) -> list[str]:
        """Return the names in the bucket."""
        return await self._bucket.names()

    def verified(self, created: str) -> list[str]:
        """Return the names that were read back and cover the stream created then."""
        return [name for name, covered in self._covered.items() if covered == created]

    def others(self, created: str) -> list[str]:
        """Return the names that were read back and cover another stream."""
        return [name for name, covered in self._covered.items() if covered != created]

    async def write(self, checkpoint: Checkpoint, log: LogExtent, names: Iterable[str]) -> str:
        """Write and read back a snapshot; return its name. `names` are in the bucket already.

        Raises:
            BrokerUnavailable: it could not be written, for instance for want of space, or not be read back.
            SnapshotTooLarge: `bytes_max` is too little.
            SnapshotDiffers, NoSuchObject, ObjectDamaged: reading it back gave something else.
        """
        name = str(SnapshotName(checkpoint.stream_seq, checkpoint.wall_ns))
        data = encode_checkpoint(checkpoint)
        await self._free_space(len(data), keeping.to_give_up(log, names, self.others(checkpoint.stream_created)))
        await self._bucket.put(name, data)
        if await self._bucket.get(name) != data:
            raise SnapshotDiffers(f"snapshot {name}")
        self._covered[name] = checkpoint.stream_created
        self.written_total += 1
        self.newest_bytes = len(data)
        return name

    async def _free_space(self, data_bytes: int, may_go: Iterable[str]) -> None:
        needed = math.ceil(data_bytes * _STORED_RATIO)
        if 2 * needed > self._bytes_max:
            raise SnapshotTooLarge(f"nats.snapshots_bytes_max: found {self._bytes_max}, allowed {2 * needed} and more")
        for name in may_go:
            if await self._bucket.size_bytes() + needed <= self._bytes_max:
                return
            _log.warning("snapshot_given_up", name=name, snapshots_bytes_max=self._bytes_max)
            await self.delete(name)

    async def delete(self, name: str) -> None:
        """Delete a snapshot, if it exists."""
        await self._bucket.delete(name)
        self._covered.pop(name, None)

    async def delete_unfinished(self, wall_ns: int) -> None:
        """Delete puts that were begun long ago and never finished."""
        if deleted := await self._bucket.delete_unfinished(wall_ns, _UNFINISHED_S):
            _log.info("unfinished_snapshots_removed", count=deleted)

    async def restore(self, stream: LogStreamState, take: Callable[[Checkpoint], None]) -> int:
        """Pass the best snapshot of the stream to `take`; return the place that it covers, 0 if there is none."""
        try:
            for name in keeping.of_this_log(extent_of(stream), await self.names()):
                if covered := await self._restore(name, stream.created, take):
                    return covered
        except BrokerUnavailable as error:
            _log.warning("snapshots_not_read", reason=str(error))
        return 0

    async def _restore(self, covers: SnapshotName, created: str, take: Callable[[Checkpoint], None]) -> int:
        name = str(covers)
        try:
            data = await self._bucket.get(name)
            checkpoint = _checkpoint_in(data, covers)
            self._covered[name] = checkpoint.stream_created
            if checkpoint.stream_created != created:
                _log.info("snapshot_of_another_log", name=name)
                return 0
            take(checkpoint)
        except (*UNREADABLE, SnapshotDiffers, IndexFull) as error:
            self._covered.pop(name, None)
            self.refused_total += 1
            _log.warning("snapshot_refused", name=name, reason=str(error))
            return 0
        self.newest_bytes = len(data)
        _log.info("snapshot_restored", name=name, stream_seq=checkpoint.stream_seq, ranks=len(checkpoint.ranks))
        return checkpoint.stream_seq


def _checkpoint_in(data: bytes, covers: SnapshotName) -> Checkpoint:
    checkpoint = decode_checkpoint(data)
    if checkpoint.stream_seq != covers.stream_seq:
        raise SnapshotDiffers(f"stream_seq: found {checkpoint.stream_seq}, allowed {covers.stream_seq}")
    return checkpoint
