"""The KV events of an attached engine, published or polled, and the consolidator of its streams.

published   the engine publishes frames (vLLM, SGLang, TensorRT-LLM when it streams):
            `engines/attached/consolidators.py`
polled      as with an engine in this process, a thread polls the engine; the same rules read TensorRT-LLM's events
            (`event_path.py`)
"""

import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from kv_runtime.tracing.service import EventTracing
from worker_agent.config import EventsSection
from worker_agent.engines.attached.config import PublisherSection, WorkerHeadSection
from worker_agent.engines.attached.consolidators import foreign_consolidator, new_epoch
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_event_subscriber import PublisherAt
from worker_agent.events.event_path import EventPath
from worker_agent.events.mirror import ENGINE
from worker_agent.events.polled_events import PolledEvents
from worker_agent.events.publisher_addresses import checked_endpoint
from worker_agent.events.source_poller import Source


def published_at(publisher: PublisherSection) -> PublisherAt:
    """Return a configured publisher's addresses, for an `EventPath`; they were checked with the configuration."""
    replay = publisher.replay_endpoint
    return PublisherAt(
        Origin(publisher.source, publisher.dp_rank),
        checked_endpoint("endpoint", publisher.endpoint, allow_remote=publisher.allow_remote),
        replay and checked_endpoint("replay_endpoint", replay, allow_remote=publisher.allow_remote),
        publisher.topic,
    )


class EventStreams:
    """One worker's streams. `polled`, `rules` and `path` are None unless the engine is polled."""

    def __init__(
        self,
        worker: WorkerHeadSection,
        events: EventsSection,
        log: EventLog,
        context: zmq.asyncio.Context,
        clock: Clock,
        *,
        polled: PolledEvents | None = None,
        tracing: EventTracing | None = None,
    ) -> None:
        self.polled = polled
        self.rules: TrtllmRules | None = None
        self.path: EventPath | None = None
        if polled is None:
            self.consolidator = foreign_consolidator(worker, events, log, context, clock, tracing)
            return
        self.rules = TrtllmRules(worker.block_size, attention_window=events.attention_window or None)
        self.path = _polled_path(worker, events, log, context, clock, polled, self.rules, tracing)
        self.consolidator = self.path.consolidator

    def parts(self, first_stage: int) -> list[Part]:
        """Return the parts, in at most five stages."""
        return self.consolidator.parts(first_stage) if self.path is None else self.path.parts(first_stage)


def _polled_path(
    worker: WorkerHeadSection,
    events: EventsSection,
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: Clock,
    polled: PolledEvents,
    rules: TrtllmRules,
    tracing: EventTracing | None,
) -> EventPath:
    core = Consolidation(
        worker.dp_ranks,
        worker.block_size,
        worker.instance,
        new_epoch,
        origins=[Origin(ENGINE)],
        is_eagle=worker.is_eagle,
        outbox_bytes_max=events.outbox_bytes_max,
        ring_bytes_max=events.batch_ring_bytes_max,
    )
    source = Source(
        polled.take, rules.translate, stale=rules.stale, events_lost=rules.events_lost, quarantine=rules.quarantine
    )
    return EventPath(
        {ENGINE: source},
        core,
        log,
        context,
        clock,
        model=worker.model,
        worker_id=worker.id,
        poll_s=events.poll_s,
        tracing=tracing,
    )
