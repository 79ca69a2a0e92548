"""A process of the event bench: an index that follows the log."""

from bench.child import Answer, Commands, cpu, serve
from bench.events.observers import ColdStart, Stamps
from bench.events.watch import AppliedMessage, WatchedLog
from indexer.embedded import EmbeddedIndex
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import SystemClock
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.supervise import Part

_POLL_S = 0.002
_KEEPER = "snapshots"


class IndexRole:
    """An index without its snapshot writer, which would start to write during a measurement."""

    def __init__(self, *, url: str) -> None:
        self._url = url
        self._clock = SystemClock()
        self._stamps = Stamps()

    @property
    def commands(self) -> Commands:
        """The commands of this role, by name."""
        return {
            "watch": self._watch,
            "recorded": self._recorded,
            "reach": self._reach,
            "proven": self._proven,
            "cpu": cpu,
        }

    async def begin(self) -> Answer:
        """Restore the snapshot, if there is one, and start to read the log."""
        self._log = await WatchedLog.connect(self._url, name="index")
        self._index = EmbeddedIndex(IndexSection(), self._log, self._clock, NatsSection())
        self._cold_start = ColdStart(self._index)
        self._log.on_applied = self._on_applied
        await self._index.start()
        self._cold_start.note_caught_up(self._clock.wall_ns())
        return {}

    def _on_applied(self, applied: AppliedMessage) -> None:
        self._stamps.on_applied(applied)
        self._cold_start.on_applied(applied)

    def parts(self) -> list[Part]:
        """Return the parts of the index without the snapshot writer."""
        return [part for part in self._index.parts(1) if part.name != _KEEPER]

    async def _watch(self) -> Answer:
        """Record batches from now on."""
        self._stamps.is_on = True
        return {}

    async def _recorded(self) -> Answer:
        """Return the recorded batches."""
        messages, size = self._stamps.messages()
        return {"rows": self._stamps.rows(), "messages": messages, "bytes": size}

    async def _reach(self, rank: str, epoch: int, seq: int) -> Answer:
        """Return when the last message was applied, once the rank is at this position."""
        await self._index.wait_for(_rank(rank), epoch, seq)
        return {"applied_ns": self._stamps.applied_ns}

    async def _proven(self, ranks: int) -> Answer:
        """Return when the index had caught up, and when the last of so many ranks was proven."""
        while len(self._cold_start.proven_ns) < ranks:
            await self._clock.sleep(_POLL_S)
        return {
            "caught_up_ns": self._cold_start.caught_up_ns,
            "proven_ns": max(self._cold_start.proven_ns.values()),
            "held_blocks": self._index.statistics().index.held_blocks,
        }

    async def end(self) -> None:
        """Close the connection."""
        await self._log.close()


def _rank(text: str) -> WorkerRank:
    worker_id, _, dp_rank = text.partition("/")
    return WorkerRank(worker_id, int(dp_rank))


if __name__ == "__main__":
    serve(IndexRole)
