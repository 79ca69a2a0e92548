"""The event path inside an agent: pollers, subscribers, and their consolidator.

    polled      a source that this process polls (`Source`): a thread hands its events to the event loop, no socket
    published   a source that publishes itself (`PublisherAddress`): an engine in another process, or the owner of a
                host tier (a KV block manager). This process subscribes to it over ZeroMQ

A worker has any number of both; a block's copies are counted by source (ADR 1).
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import RESTARTS, Part, Restarts, run_parts
from kv_runtime.tracing.service import EventTracing
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_event_subscriber import PublisherAddress, reader_at
from worker_agent.events.poll_rules import Relearning
from worker_agent.events.publishers import PublisherSection
from worker_agent.events.quarantine import Quarantine
from worker_agent.events.source_poller import Source, SourcePoller
from worker_agent.port.types import POLL_S

_END_S = 5.0


class WorkerStreams(NamedTuple):
    """One worker whose streams are published. `publishers`: none if its engine is polled, or has no events."""

    id: str
    model: str
    instance: str
    block_size: int
    dp_ranks: tuple[int, ...]
    is_eagle: bool = False
    publishers: tuple[PublisherAddress, ...] = ()


def new_epoch() -> int:
    """Return a random epoch for a stream; never 0."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def origins_of(sources: Iterable[str], published: Iterable[PublisherAddress] = ()) -> list[Origin]:
    """Return the origins of these sources and publishers, for the consolidation."""
    return [*map(Origin, sources), *(each.origin for each in published)]


async def end_unrun(parts: Iterable[Part]) -> None:
    """Run the parts with `stop` set, so that they close their sockets and end.

    A ZeroMQ context cannot be destroyed before all its sockets are closed, and the parts own these sockets.
    """
    stop = asyncio.Event()
    stop.set()
    await run_parts(parts, stop=stop, drain_s=_END_S)


def polled_engine(rules: TrtllmRules, take: Callable[[float], list[Any]], buffer_events: int = 0) -> Source:
    """Return the source of an engine that says its events in TensorRT-LLM's form, read by `rules`."""
    return Source(
        take,
        rules.translate,
        buffer_events=buffer_events,
        stale=rules.stale,
        events_lost=rules.events_lost,
        quarantine=rules.quarantine,
    )


def event_path(
    worker: WorkerStreams,
    sources: Mapping[str, Source],
    configured: Iterable[PublisherSection],
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: Clock,
    *,
    ring_bytes_max: int,
    tracing: EventTracing | None = None,
    stale: str = "",
) -> "EventPath":
    """Return the path of a worker's events, whose streams have new epochs; `configured` are further publishers.

    Raises:
        ConfigurationError: a publisher is of a rank that the worker has not.
    """
    published = [*worker.publishers, *(each.at for each in configured)]
    strange = [each.origin for each in published if each.origin.dp_rank not in (None, *worker.dp_ranks)]
    if strange:
        found = ", ".join(f"dp_rank {each.dp_rank} of {each.source}" for each in strange)
        allowed = f"allowed the worker's ranks: {list(worker.dp_ranks)}"
        raise ConfigurationError([f"events.sources: found {found}, {allowed}"])
    core = Consolidation(
        worker.dp_ranks,
        worker.block_size,
        worker.instance,
        new_epoch,
        origins=origins_of(sources, published),
        is_eagle=worker.is_eagle,
        ring_bytes_max=ring_bytes_max,
    )
    return EventPath(
        sources,
        core,
        log,
        context,
        clock,
        model=worker.model,
        worker_id=worker.id,
        published=published,
        tracing=tracing,
        stale=stale,
    )


class EventPath:
    """The event path; `context` is for the subscribers. `core` has the origins of both kinds of source."""

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
        poll_s: float = POLL_S,
        published: Sequence[PublisherAddress] = (),
        restarts: Restarts = RESTARTS,
        tracing: EventTracing | None = None,
        stale: str = "",
    ) -> None:
        """`stale`: why the ranks' blocks are not known, whatever is read."""
        self._sources, self._always_stale = sources, stale
        self._relearning = {name: Relearning() for name in sources}
        self.pollers = {
            name: SourcePoller(source, poll_s=poll_s, wall_ns=clock.wall_ns, name=name, restarts=restarts)
            for name, source in sources.items()
        }
        self._published = [reader_at(each, context, clock) for each in published]
        self.consolidator = Consolidator(
            core,
            self._published,
            log,
            clock,
            model=model,
            worker_id=worker_id,
            source_stale=self._stale,
            tracing=tracing,
        )

    def parts(self, first_stage: int) -> list[Part]:
        """Return the parts, in five stages: polling threads first, then the consolidator's four."""
        return [
            *(part for each in self.pollers.values() for part in each.parts(self.consolidator, first_stage)),
            *self.consolidator.parts(first_stage + 1),
        ]

    async def position(self) -> dict[int, tuple[int, int]]:
        """Return each rank's (epoch, last seq) after all that the polled sources had flushed before the call.

        For sources that publish themselves the position only covers the messages read so far.
        """
        await asyncio.gather(*(each.until_delivered() for each in self.pollers.values()))
        return self.consolidator.positions()

    def status(self) -> list[dict[str, Any]]:
        """Return each source's status and its newest quarantined events, for operators."""
        return [*self._polled_status(), *self._published_status()]

    def _polled_status(self) -> list[dict[str, Any]]:
        return [
            {
                "source": name,
                "failure": poller.thread.failure or poller.failure,
                "poll_failures": poller.poll_failures_total,
                "thread_failures": poller.thread.failures_total,
                "quarantined": [] if (quarantine := self._sources[name].quarantine) is None else _shown(quarantine),
            }
            for name, poller in self.pollers.items()
        ]

    def _published_status(self) -> list[dict[str, Any]]:
        publishers = self.consolidator.core.publishers
        return [
            {
                "source": str(reader.origin),
                "failure": reader.stale(),
                "lost": reader.cursor.lost_total,
                "refused": list(publishers[reader.origin].refused),
            }
            for reader in self._published
        ]

    def _stale(self, dp_rank: int) -> str:
        reasons = ((name, each) for name in self._sources for each in self._reasons(name, dp_rank))
        return self._always_stale or "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def _reasons(self, name: str, dp_rank: int) -> tuple[str, ...]:
        source, poller, relearning = self._sources[name], self.pollers[name], self._relearning[name]
        outbox = self.consolidator.core.outbox(dp_rank)
        relearning.on_progress(dp_rank, poller.drained, poller.delivered, outbox.last_seq, outbox.published_seq)
        missing = relearning.missing(dp_rank, source.events_lost.get(dp_rank, 0))
        return (
            f"its thread failed: {poller.thread.failure}" if poller.thread.failure else "",
            "events lost with a failure of its thread" if poller.delivered <= poller.lost_at else "",
            f"{missing} events lost, relearning" if missing else "",
            source.stale(dp_rank),
            poller.failure,
        )


def _shown(quarantine: Quarantine) -> list[dict[str, Any]]:
    return [each._asdict() for each in quarantine.kept]
