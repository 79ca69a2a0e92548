"""Writes snapshots to their bucket and reads them back.

    written     put, got again, and compared; only then is the name one of the `verified`
    restored    the best that decodes, covers what its name says, is of the stream that is there, and that the index
                takes; what is none of that is logged and counted, and the next is tried

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
from kv_runtime.event_log import BrokerUnavailable, EventLog, NoSuchObject, ObjectDamaged, StreamState

UNREADABLE = (NoSuchObject, ObjectDamaged, MalformedMessage, LimitExceeded)
_STORED_RATIO = 1.01
"""What an object takes on disk, to its own bytes, with room to spare; small ones take more, and do not matter."""
_UNFINISHED_S = 3600.0
"""After that a put that somebody began is not going to be finished."""

_log = structlog.get_logger("indexer")


class SnapshotDiffers(Exception):
    """What was read is not what was written under that name."""


class SnapshotTooLarge(Exception):
    """The bucket has no room for two such snapshots, whatever is given up; the old ones stay."""


def extent_of(stream: StreamState) -> LogExtent:
    """Return what a plan reads of the log."""
    return LogExtent(stream.first_seq, stream.last_seq, stream.bytes)


class SnapshotStore:
    """The snapshots of one index."""

    def __init__(self, log: EventLog, bytes_max: int) -> None:
        self._bucket = log.objects(subjects.SNAPSHOT_BUCKET)
        self._bytes_max = bytes_max
        self._covered: dict[str, str] = {}
        """Of what was written here, or read: name -> the birth of the stream that it covers."""
        self.written_total = 0
        self.refused_total = 0
        """Snapshots that were there, and could not be used."""
        self.newest_bytes = 0
        """What the one takes that was written or read last."""

    async def names(self) -> list[str]:
        """Return the names of what is there."""
        return await self._bucket.names()

    def verified(self, created: str) -> list[str]:
        """Return the names of what was read back, and covers the stream of that birth."""
        return [name for name, covered in self._covered.items() if covered == created]

    def others(self, created: str) -> list[str]:
        """Return the names of what was read back, and covers another stream."""
        return [name for name, covered in self._covered.items() if covered != created]

    async def write(self, checkpoint: Checkpoint, log: LogExtent, names: Iterable[str]) -> str:
        """Return the name under which the snapshot is there, whole and readable; `names` are there already.

        Raises:
            BrokerUnavailable: it could not be written, for instance for want of room, or not be read back.
            SnapshotTooLarge: `bytes_max` is too little.
            SnapshotDiffers, NoSuchObject, ObjectDamaged: it was not what was read back.
        """
        name = str(SnapshotName(checkpoint.stream_seq, checkpoint.wall_ns))
        data = encode_checkpoint(checkpoint)
        await self._make_room(len(data), keeping.to_give_up(log, names, self.others(checkpoint.stream_created)))
        await self._bucket.put(name, data)
        if await self._bucket.get(name) != data:
            raise SnapshotDiffers(f"snapshot {name}")
        self._covered[name] = checkpoint.stream_created
        self.written_total += 1
        self.newest_bytes = len(data)
        return name

    async def _make_room(self, data_bytes: int, may_go: Iterable[str]) -> None:
        needed = math.ceil(data_bytes * _STORED_RATIO)
        if 2 * needed > self._bytes_max:
            raise SnapshotTooLarge(f"nats.snapshots_bytes_max: found {self._bytes_max}, allowed {2 * needed} and more")
        for name in may_go:
            if await self._bucket.size_bytes() + needed <= self._bytes_max:
                return
            _log.warning("snapshot_given_up", name=name, snapshots_bytes_max=self._bytes_max)
            await self.delete(name)

    async def delete(self, name: str) -> None:
        """The snapshot is not there."""
        await self._bucket.delete(name)
        self._covered.pop(name, None)

    async def sweep(self, wall_ns: int) -> None:
        """What was begun long ago and never finished is gone."""
        if swept := await self._bucket.sweep(wall_ns, _UNFINISHED_S):
            _log.info("unfinished_snapshots_removed", count=swept)

    async def restore(self, stream: StreamState, take: Callable[[Checkpoint], None]) -> int:
        """Give `take` the best snapshot of the stream; return the place that it covers, 0 where there is none."""
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
