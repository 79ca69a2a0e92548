"""The event path inside an agent's process: each source's publisher and replay server, and their consolidator."""

import asyncio
from collections.abc import Mapping

import zmq
import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, thread_part
from worker_agent.consolidator import Consolidator
from worker_agent.core.consolidation import Consolidation, Origin
from worker_agent.core.relearning import Relearning
from worker_agent.core.source_cursor import SourceCursor
from worker_agent.hop_a_reader import HopAReader
from worker_agent.publisher import EventPublisher, ReplayServer, Source


class EventPath:
    """All of it, on sockets of its own. `core` has an origin for each of the `sources`, which are named for them."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        core: Consolidation,
        log: EventLog,
        context: zmq.asyncio.Context,
        clock: Clock,
        *,
        model: str,
        worker_id: str,
        ring_bytes_max: int,
        poll_s: float,
    ) -> None:
        self._sources = sources
        self._relearning = {name: Relearning() for name in sources}
        self.publishers = {
            name: EventPublisher(
                source,
                zmq.Context(context),
                ring_bytes_max=ring_bytes_max,
                poll_s=poll_s,
                wall_ns=clock.wall_ns,
            )
            for name, source in sources.items()
        }
        self._replays = {name: ReplayServer(each.ring, context) for name, each in self.publishers.items()}
        self._readers = {
            name: HopAReader(
                Origin(name),
                SourceCursor(),
                context,
                clock,
                publish_endpoint=publisher.endpoint,
                replay_endpoint=self._replays[name].endpoint,
            )
            for name, publisher in self.publishers.items()
        }
        self.consolidator = Consolidator(
            core,
            list(self._readers.values()),
            log,
            clock,
            model=model,
            worker_id=worker_id,
            source_stale=self._stale,
        )

    def parts(self, first_stage: int) -> list[Part]:
        """Return what is to run, in five stages: the publishers, four of the consolidator; replay servers stop last."""
        return [
            *(thread_part(f"{name}-events", each.run, stage=first_stage) for name, each in self.publishers.items()),
            *self.consolidator.parts(first_stage + 1),
            *(Part(f"{name}-replays", each.run, first_stage + 4) for name, each in self._replays.items()),
        ]

    async def position(self) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq) after all that the sources had flushed before the call."""
        barriers = await asyncio.gather(*(each.barrier() for each in self.publishers.values()))
        for name, sequence in zip(self.publishers, barriers, strict=True):
            position = await self.consolidator.position(sequence, name)
        return position

    def _stale(self, dp_rank: int) -> str:
        reasons = ((name, each) for name in self._sources for each in self._reasons(name, dp_rank))
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def _reasons(self, name: str, dp_rank: int) -> tuple[str, ...]:
        source, publisher, relearning = self._sources[name], self.publishers[name], self._relearning[name]
        outbox = self.consolidator.core.outbox(dp_rank)
        relearning.on_progress(
            dp_rank, publisher.drained, self._readers[name].cursor.expected, outbox.last_seq, outbox.published_seq
        )
        missing = relearning.missing(dp_rank, source.events_lost.get(dp_rank, 0))
        return (
            f"{missing} events lost, relearning" if missing else "",
            source.stale(dp_rank),
            publisher.failure,
        )
