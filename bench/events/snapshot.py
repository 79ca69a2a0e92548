"""A process of the event bench: an index in parts that writes a snapshot."""

from bench.child import Answer, serve
from bench.events.run import LogRole
from indexer.follow.fold import IndexFold
from indexer.native.index import make_index
from indexer.service.feed import IndexFeed
from indexer.service.snapshot_store import SnapshotStore, extent_of
from kv_protocol import subjects
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part

_POLL_S = 0.001


class SnapshotRole(LogRole):
    """An index composed as `EmbeddedIndex` composes it; only this role writes snapshots."""

    async def begin(self) -> Answer:
        """Start to read the log."""
        self._log = await EventLog.connect(self._url, name="keeper")
        self._fold = IndexFold(make_index(IndexSection()))
        self._snapshots = SnapshotStore(self._log, NatsSection().snapshots_bytes_max)
        self._feed = IndexFeed(self._fold, self._log, self._clock, self._snapshots, FleetGate())
        await self._feed.start()
        return {}

    def parts(self) -> list[Part]:
        """Return the feed and the connection."""
        return [Part("feed", self._feed.run, 1), Part("log", self._log.run, 1)]

    async def write(self) -> Answer:
        """Write a snapshot once the index has caught up."""
        while self._feed.catching_up():
            await self._clock.sleep(_POLL_S)
        log, names = extent_of(await self._log.stream_state(subjects.EVENTS_STREAM)), await self._snapshots.names()
        at = self._feed.log_position
        checkpoint = self._fold.checkpoint(at.created, at.stream_seq, self._clock.wall_ns())
        await self._snapshots.write(checkpoint, log, names)
        return {}


if __name__ == "__main__":
    serve(SnapshotRole)
