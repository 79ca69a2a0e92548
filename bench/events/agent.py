"""A process of the event bench: a worker's consolidator, which gets blocks over engine events or directly.

    reads    the publisher is another process (`player.py`): saturation
    holds    no ZMQ: payloads go directly into the consolidation, so that many blocks are held soon

Everything after the consolidation is real: streams, answers, heartbeats.
"""

import time

import zmq.asyncio

from bench.child import Answer, serve
from bench.events.load import EventLoad, engine_events, payloads
from bench.events.run import LogRole
from bench.events.source import MODEL
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.event_path import new_epoch

_POLL_S = 0.002
_EVENTS_A_PAYLOAD = 8
_STAGES = 4
_RING_BYTES = 16 << 20


class AgentRole(LogRole):
    """One worker. Each of its ranks keeps `_RING_BYTES` for replays."""

    def __init__(
        self, *, url: str, worker: str, dp_ranks: int, block_size: int, publisher: str = "", replay: str = ""
    ) -> None:
        super().__init__(url)
        self._worker, self._dp_ranks, self._block_size = worker, dp_ranks, block_size
        self._publisher, self._replay = publisher, replay
        self._context = zmq.asyncio.Context()
        self._sequence = 0

    async def begin(self) -> Answer:
        """Connect and start the consolidator; each rank announces itself."""
        self._log = await EventLog.connect(self._url, name="agent")
        ranks = tuple(range(self._dp_ranks))
        core = Consolidation(ranks, self._block_size, "bench", new_epoch, ring_bytes_max=_RING_BYTES)
        self._consolidator = Consolidator(
            core, self._readers(), self._log, self._clock, model=MODEL, worker_id=self._worker
        )
        await self._consolidator.start()
        return {}

    def _readers(self) -> list[EngineEventSubscriber]:
        if not self._publisher:
            return []
        at = PublisherAddress(SOLE, self._publisher, self._replay)
        return [EngineEventSubscriber(at, self._context, self._clock)]

    def parts(self) -> list[Part]:
        """Return the parts of the consolidator and of the connection."""
        return [*self._consolidator.parts(1), Part("log", self._log.run, 1 + _STAGES)]

    async def hold(self, dp_rank: int, load: dict[str, int]) -> Answer:
        """Return once the rank holds these blocks too and their events are in the log."""
        consolidator, events = self._consolidator, engine_events(EventLoad(**load))
        for payload in payloads(events, _EVENTS_A_PAYLOAD, dp_rank=dp_rank, time_s=time.time()):
            self._sequence += 1
            for changed in consolidator.core.on_payload(self._sequence, payload):
                consolidator.streams[changed].wake()
            await self._clock.sleep(0)
        outbox = consolidator.core.outbox(dp_rank)
        while outbox.waiting_bytes:
            await self._clock.sleep(_POLL_S)
        return {}

    async def position(self, sequence: int) -> Answer:
        """Return the position of rank 0 once the publisher was read up to before `sequence`."""
        consolidator = self._consolidator
        (reader,) = consolidator.readers
        await reader.until_read(sequence)
        epoch, last_seq = (await consolidator.position())[0]
        lost = sum(each.losses_total for each in consolidator.core.publishers.values())
        return {"epoch": epoch, "last_seq": last_seq, "losses": lost}

    async def end(self) -> None:
        """Close sockets and connection."""
        await super().end()
        self._context.destroy(linger=0)


if __name__ == "__main__":
    serve(AgentRole)
