"""The event path inside an agent: each source's publisher and replay server, and their consolidator.

    polled      a source that this process polls (`Source`): a thread publishes its events over ZeroMQ in this process
    published   a source that publishes itself (`PublisherAt`): an engine that streams its events, the KV block manager
                of a host tier. This process subscribes to it directly

A worker has any number of both; a block's copies are counted by source (ADR 8).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import RESTARTS, Part, Restarts, thread_part
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import PublisherAt, reader_at
from worker_agent.events.publisher import EventPublisher, ReplayServer, Source
from worker_agent.events.quarantine import Quarantine
from worker_agent.events.relearning import Relearning


def origins_of(sources: Iterable[str], published: Iterable[PublisherAt] = ()) -> list[Origin]:
    """Return the origins of these sources and publishers, for the consolidation."""
    return [*map(Origin, sources), *(each.origin for each in published)]


class EventPath:
    """The event path, with its own sockets. `core` has the origins of both kinds of source."""

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
        published: Sequence[PublisherAt] = (),
        restarts: Restarts = RESTARTS,
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
                name=name,
                restarts=restarts,
            )
            for name, source in sources.items()
        }
        self._replays = {name: ReplayServer(each.ring, context) for name, each in self.publishers.items()}
        ours = {
            name: PublisherAt(Origin(name), each.endpoint, self._replays[name].endpoint)
            for name, each in self.publishers.items()
        }
        self._readers = {name: reader_at(each, context, clock) for name, each in ours.items()}
        self._published = [reader_at(each, context, clock) for each in published]
        self.consolidator = Consolidator(
            core,
            [*self._readers.values(), *self._published],
            log,
            clock,
            model=model,
            worker_id=worker_id,
            source_stale=self._stale,
        )

    def parts(self, first_stage: int) -> list[Part]:
        """Return the parts, in five stages: publishers first, then the consolidator's four; replay servers last."""
        return [
            *(thread_part(f"{name}-events", each.run, stage=first_stage) for name, each in self.publishers.items()),
            *self.consolidator.parts(first_stage + 1),
            *(Part(f"{name}-replays", each.run, first_stage + 4) for name, each in self._replays.items()),
        ]

    async def position(self) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq) after all that the polled sources had flushed before the call.

        For sources that publish themselves the position only covers the messages read so far.
        """
        barriers = await asyncio.gather(*(each.barrier() for each in self.publishers.values()))
        for name, sequence in zip(self.publishers, barriers, strict=True):
            await self.consolidator.position(sequence, name)
        return self.consolidator.positions()

    def status(self) -> list[dict[str, Any]]:
        """Return each source's status and its newest quarantined events, for operators."""
        return [*self._polled_status(), *self._published_status()]

    def _polled_status(self) -> list[dict[str, Any]]:
        return [
            {
                "source": name,
                "failure": publisher.thread.failure or publisher.failure,
                "poll_failures": publisher.poll_failures_total,
                "thread_failures": publisher.thread.failures_total,
                "quarantined": [] if (quarantine := self._sources[name].quarantine) is None else _shown(quarantine),
            }
            for name, publisher in self.publishers.items()
        ]

    def _published_status(self) -> list[dict[str, Any]]:
        origins = self.consolidator.core.statistics().origins
        return [
            {
                "source": str(reader.origin),
                "failure": reader.stale(),
                "lost": reader.cursor.lost_total,
                "refused": list(origins[reader.origin].refused),
            }
            for reader in self._published
        ]

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
        is_left_out = self._readers[name].cursor.expected <= publisher.left_out
        return (
            f"its thread failed: {publisher.thread.failure}" if publisher.thread.failure else "",
            "events lost with a failure of its thread" if is_left_out else "",
            f"{missing} events lost, relearning" if missing else "",
            source.stale(dp_rank),
            publisher.failure,
        )


def _shown(quarantine: Quarantine) -> list[dict[str, Any]]:
    return [each._asdict() for each in quarantine.kept]
