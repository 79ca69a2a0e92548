"""A process of the event bench: an index in parts that writes a snapshot, and how long that blocks its event loop."""

import asyncio

from bench.events.child import Answer, Commands, serve
from indexer.follow.checkpoint import encode_checkpoint
from indexer.follow.fold import IndexFold
from indexer.native.index import make_index
from indexer.service.feed import IndexFeed
from indexer.service.snapshot_store import SnapshotStore, extent_of
from kv_protocol import subjects
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part

_POLL_S = 0.001


class SnapshotRole:
    """An index composed as `EmbeddedIndex` composes it; only this role writes snapshots."""

    def __init__(self, *, url: str) -> None:
        self._url = url
        self._clock = SystemClock()
        self._stalled_s = 0.0

    @property
    def commands(self) -> Commands:
        """The commands of this role, by name."""
        return {"write": self._write}

    async def begin(self) -> Answer:
        """Start to read the log."""
        self._log = await EventLog.connect(self._url, name="keeper")
        self._fold = IndexFold(make_index(IndexSection()))
        self._snapshots = SnapshotStore(self._log, NatsSection().snapshots_bytes_max)
        self._feed = IndexFeed(self._fold, self._log, self._clock, self._snapshots, FleetGate())
        await self._feed.start()
        return {}

    def parts(self) -> list[Part]:
        """Return the feed, the connection, and the watch over the event loop."""
        return [Part("feed", self._feed.run, 1), Part("log", self._log.run, 1), Part("stalls", self._watch_loop, 1)]

    async def _watch_loop(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            before_s = self._clock.now()
            await self._clock.sleep(_POLL_S)
            self._stalled_s = max(self._stalled_s, self._clock.now() - before_s - _POLL_S)

    async def _write(self) -> Answer:
        """Write a snapshot once the index has caught up, read it back, and return the time of each step.

        `blocked_s` is the longest time that the event loop was blocked.
        """
        while self._feed.catching_up():
            await self._clock.sleep(_POLL_S)
        log, names = extent_of(await self._log.stream_state(subjects.EVENTS_STREAM)), await self._snapshots.names()
        self._stalled_s = 0.0
        await self._clock.sleep(2 * _POLL_S)
        began_s, log_position = self._clock.now(), self._feed.log_position
        checkpoint = self._fold.checkpoint(log_position.created, log_position.stream_seq, self._clock.wall_ns())
        folded_s = self._clock.now()
        await self._snapshots.write(checkpoint, log, names)
        ended_s = self._clock.now()
        await self._clock.sleep(2 * _POLL_S)
        stalled_s, again_s = self._stalled_s, self._clock.now()
        data = encode_checkpoint(checkpoint)
        return {
            "checkpoint_s": folded_s - began_s,
            "encode_s": self._clock.now() - again_s,
            "total_s": ended_s - began_s,
            "blocked_s": stalled_s,
            "bytes": len(data),
        }

    async def end(self) -> None:
        """Close the connection."""
        await self._log.close()


if __name__ == "__main__":
    serve(SnapshotRole)
