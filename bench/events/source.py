"""A process of the event bench: an agent whose engine reports blocks by a schedule.

The path is real from the polling thread on: the poller, the consolidator, the log. The engine and
its dialect are simulated: the source gives events that need no translation, when they are due.
"""

import secrets
import time
from math import inf
from typing import cast

from bench.child import Answer, serve
from bench.events.load import EventLoad, Flush, schedule
from bench.events.run import LogRole
from bench.events.watch import WatchedLog
from kv_protocol.ids import WorkerRank
from kv_runtime.supervise import Part
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import RankEvent
from worker_agent.events.event_path import new_epoch
from worker_agent.events.source_poller import Source

MODEL = "bench"
_POLL_S = 0.05


class TranslatedEvents(TrtllmRules):
    """The rules of a source whose events need no translation."""

    def __init__(self) -> None:
        super().__init__(1)

    def translate(self, engine_events: object) -> list[RankEvent]:
        """Return the events as they are."""
        return cast("list[RankEvent]", engine_events)


class ScheduledEngine:
    """Reports its flushes when they are due; the polling thread calls `take`."""

    def __init__(self, flushes: list[Flush]) -> None:
        self._flushes = flushes
        self._at = 0
        self._begins_ns = 0
        self.flushed_ns: list[int] = []
        """When the engine flushed each event."""

    def begin(self, begins_ns: int) -> None:
        """Start the schedule at this moment; before, no flush is due."""
        self._begins_ns = begins_ns

    @property
    def is_over(self) -> bool:
        """Whether all flushes were reported."""
        return self._at == len(self._flushes)

    def take(self, timeout_s: float) -> list[RankEvent]:
        """Wait for the next flush, at most `timeout_s`; return the events of all flushes that are due."""
        time.sleep(min(self._wait_s(), timeout_s))
        taken: list[RankEvent] = []
        while self._wait_s() <= 0:
            flush = self._flushes[self._at]
            self.flushed_ns += [self._due_ns(flush)] * len(flush.events)
            taken += [RankEvent(0, event) for event in flush.events]
            self._at += 1
        return taken

    def _wait_s(self) -> float:
        if self.is_over or not self._begins_ns:
            return inf
        return max(0.0, self._due_ns(self._flushes[self._at]) - time.time_ns()) / 1e9

    def _due_ns(self, flush: Flush) -> int:
        return self._begins_ns + round(flush.after_s * 1e9)


class SourceRole(LogRole):
    """A worker of one rank; its engine computes `blocks_s` blocks a second of `load` after the command `play`."""

    _log: WatchedLog

    def __init__(self, *, url: str, worker: str, load: dict[str, int], blocks_s: float) -> None:
        super().__init__(url)
        self._worker = worker
        self._load = EventLoad(**load)
        self._engine = ScheduledEngine(schedule(self._load, blocks_s))
        self._handed: dict[int, int] = {}

    async def begin(self) -> Answer:
        """Connect the agent and prepare its parts."""
        self._log = await WatchedLog.connect(self._url, name=self._worker)
        self._log.on_handed = self._on_handed
        core = Consolidation((0,), self._load.block_size, secrets.token_hex(4), new_epoch)
        self._path = Consolidator(
            core,
            [],
            self._log,
            self._clock,
            model=MODEL,
            worker_id=self._worker,
            source=Source(self._engine.take, TranslatedEvents()),
            poll_s=_POLL_S,
        )
        await self._path.start()
        return {}

    def _on_handed(self, message_id: str, now_ns: int) -> None:
        self._handed.setdefault(int(message_id.rpartition("/")[2]), now_ns)

    def parts(self) -> list[Part]:
        """Return the parts of the event path and of the connection."""
        return [*self._path.parts(1), Part("log", self._log.run, 6)]

    async def play(self, begins_ns: int) -> Answer:
        """Start the engine at that moment."""
        self._engine.begin(begins_ns)
        return {}

    async def played(self) -> Answer:
        """Wait until all is published; return when each event was flushed and each message handed over."""
        while not self._engine.is_over:
            await self._clock.sleep(_POLL_S)
        epoch, last_seq = (await self._path.position())[0]
        outbox = self._path.core.outbox(0)
        while outbox.waiting_bytes:
            await self._clock.sleep(_POLL_S)
        assert last_seq == len(self._engine.flushed_ns), "an event is a batch"
        rank = WorkerRank(self._worker, 0)
        return {
            "rank": str(rank),
            "epoch": epoch,
            "last_seq": last_seq,
            "flushed_ns": self._engine.flushed_ns,
            "handed_ns": sorted(self._handed.items()),
        }


if __name__ == "__main__":
    serve(SourceRole)
