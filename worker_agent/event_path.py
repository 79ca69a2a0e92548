"""The event path inside an agent's process: each source's publisher and replay server, and their consolidator."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

import zmq
import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, thread_part
from worker_agent.consolidator import Consolidator
from worker_agent.core.consolidation import Consolidation, Origin
from worker_agent.core.engine_events import RankEvent
from worker_agent.core.source_cursor import SourceCursor
from worker_agent.hop_a_reader import HopAReader
from worker_agent.publisher import EventPublisher, ReplayServer


class Source(NamedTuple):
    """One source of events: `poll` waits at most so many seconds for some.

    `stale` says, at any time and from any thread, why what was polled of a rank may not be what the source holds.
    """

    poll: Callable[[float], list[RankEvent]]
    stale: Callable[[int], str]


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
        self._publishers = {
            name: EventPublisher(
                source.poll,
                zmq.Context(context),
                ring_bytes_max=ring_bytes_max,
                poll_s=poll_s,
                wall_ns=clock.wall_ns,
            )
            for name, source in sources.items()
        }
        self._replays = {name: ReplayServer(each.ring, context) for name, each in self._publishers.items()}
        readers = [
            HopAReader(
                Origin(name),
                SourceCursor(),
                context,
                clock,
                publish_endpoint=publisher.endpoint,
                replay_endpoint=self._replays[name].endpoint,
            )
            for name, publisher in self._publishers.items()
        ]
        self.consolidator = Consolidator(
            core, readers, log, clock, model=model, worker_id=worker_id, source_stale=self._stale
        )

    def parts(self, first_stage: int) -> list[Part]:
        """Return what is to run, in five stages: the publishers, four of the consolidator; replay servers stop last."""
        return [
            *(thread_part(f"{name}-events", each.run, stage=first_stage) for name, each in self._publishers.items()),
            *self.consolidator.parts(first_stage + 1),
            *(Part(f"{name}-replays", each.run, first_stage + 4) for name, each in self._replays.items()),
        ]

    async def position(self) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq) after all that the sources had flushed before the call."""
        barriers = await asyncio.gather(*(each.barrier() for each in self._publishers.values()))
        for name, sequence in zip(self._publishers, barriers, strict=True):
            position = await self.consolidator.position(sequence, name)
        return position

    def _stale(self, dp_rank: int) -> str:
        reasons = ((name, each.stale(dp_rank)) for name, each in self._sources.items())
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)
