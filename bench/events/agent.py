"""A process of the event bench: consolidators, which get blocks over engine events or directly.

    reads    the one worker's publisher is another process (`player.py`): saturation
    holds    no ZMQ: payloads go directly into the consolidation, so that many blocks are held soon

Everything after the consolidation is real: streams, answers, heartbeats.
"""

import time
from collections.abc import Sequence

import zmq.asyncio

from bench.events.child import Answer, Commands, cpu, serve
from bench.events.load import EventLoad, engine_events, payloads
from bench.events.source import MODEL
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber
from worker_agent.events.event_path import new_epoch
from worker_agent.events.source_cursor import SourceCursor

_POLL_S = 0.002
_EVENTS_A_PAYLOAD = 8
_STAGES = 4


class AgentRole:
    """Workers of one host. Each rank of a worker keeps `ring_bytes` for replays."""

    def __init__(
        self,
        *,
        url: str,
        workers: Sequence[dict[str, int | str]],
        block_size: int,
        publisher: str = "",
        replay: str = "",
    ) -> None:
        self._url, self._workers, self._block_size = url, workers, block_size
        self._publisher, self._replay = publisher, replay
        self._clock = SystemClock()
        self._context = zmq.asyncio.Context()
        self._consolidators: dict[str, Consolidator] = {}
        self._sequence = 0

    @property
    def commands(self) -> Commands:
        """The commands of this role, by name."""
        return {"hold": self._hold, "position": self._position, "cpu": cpu}

    async def begin(self) -> Answer:
        """Connect and start the consolidator of every worker; each rank announces itself."""
        self._log = await EventLog.connect(self._url, name="agent")
        for worker in self._workers:
            consolidator = self._consolidator(str(worker["id"]), int(worker["dp_ranks"]), int(worker["ring_bytes"]))
            self._consolidators[consolidator.worker_id] = consolidator
            await consolidator.start()
        return {}

    def _consolidator(self, worker_id: str, dp_ranks: int, ring_bytes: int) -> Consolidator:
        core = Consolidation(tuple(range(dp_ranks)), self._block_size, "bench", new_epoch, ring_bytes_max=ring_bytes)
        return Consolidator(core, self._readers(), self._log, self._clock, model=MODEL, worker_id=worker_id)

    def _readers(self) -> list[EngineEventSubscriber]:
        if not self._publisher:
            return []
        reader = EngineEventSubscriber(
            SOLE,
            SourceCursor(),
            self._context,
            self._clock,
            publish_endpoint=self._publisher,
            replay_endpoint=self._replay,
        )
        return [reader]

    def parts(self) -> list[Part]:
        """Return the parts of all consolidators and of the connection."""
        parts = [part for each in self._consolidators.values() for part in each.parts(1)]
        return [*parts, Part("log", self._log.run, 1 + _STAGES)]

    async def _hold(self, worker: str, dp_rank: int, load: dict[str, int]) -> Answer:
        """Return the rank's position once it holds these blocks too and their events are in the log."""
        consolidator, events = self._consolidators[worker], engine_events(EventLoad(**load))
        for payload in payloads(events, _EVENTS_A_PAYLOAD, dp_rank=dp_rank, time_s=time.time()):
            self._sequence += 1
            for changed in consolidator.core.on_payload(self._sequence, payload):
                consolidator.streams[changed].wake()
            await self._clock.sleep(0)
        outbox = consolidator.core.outbox(dp_rank)
        while outbox.waiting_bytes:
            await self._clock.sleep(_POLL_S)
        return {"epoch": outbox.epoch, "last_seq": outbox.last_seq}

    async def _position(self, worker: str, sequence: int) -> Answer:
        """Return the position of rank 0 once the publisher was read up to before `sequence`."""
        consolidator = self._consolidators[worker]
        (reader,) = consolidator.readers
        await reader.until_read(sequence)
        epoch, last_seq = consolidator.positions()[0]
        lost = sum(origin.losses_total for origin in consolidator.core.statistics().origins.values())
        return {"epoch": epoch, "last_seq": last_seq, "losses": lost}

    async def end(self) -> None:
        """Close sockets and connection."""
        await self._log.close()
        self._context.destroy(linger=0)


if __name__ == "__main__":
    serve(AgentRole)
