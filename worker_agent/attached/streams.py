"""The KV events of an attached engine, published or polled, and the consolidator of its streams.

published   the engine publishes frames (vLLM, SGLang, TensorRT-LLM when it streams)
polled      as with an engine in this process, a thread polls the engine; the same rules read TensorRT-LLM's events
"""

import secrets
from collections.abc import Mapping

import zmq.asyncio

from kv_protocol.fleet import NO_EVENTS
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.tracing.service import EventTracing
from worker_agent.attached.config import EventsSection, WorkerHeadSection, WorkerStreamsSection
from worker_agent.attached.polled_events import PolledEvents
from worker_agent.config import StreamsSection
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.event_path import EventPath, new_epoch, origins_of
from worker_agent.events.mirror import ENGINE
from worker_agent.events.source_poller import Source


def event_path(
    worker: WorkerHeadSection,
    events: StreamsSection,
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: Clock,
    *,
    polled: Mapping[str, Source] | None = None,
    tracing: EventTracing | None = None,
) -> EventPath:
    """Return the path of the worker's events: of its configured publishers, and of sources that are `polled`.

    Without either its ranks are stale for good: the worker says that it has no events.
    """
    publishers = worker.publishers if isinstance(worker, WorkerStreamsSection) else ()
    published, sources = [each.at for each in publishers], polled or {}
    core = Consolidation(
        worker.dp_ranks,
        worker.block_size,
        worker.instance or secrets.token_hex(8),
        new_epoch,
        origins=origins_of(sources, published),
        is_eagle=worker.is_eagle,
        ring_bytes_max=events.batch_ring_bytes_max,
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
        stale="" if sources or published else NO_EVENTS,
    )


class EventStreams:
    """One attached worker's streams, with the parts of `path`. `polled` and `rules`: None unless it is polled."""

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
        sources = {}
        if polled is not None:
            rules = self.rules = TrtllmRules(worker.block_size, attention_window=events.attention_window or None)
            sources[ENGINE] = Source(
                polled.take,
                rules.translate,
                stale=rules.stale,
                events_lost=rules.events_lost,
                quarantine=rules.quarantine,
            )
        self.path = event_path(worker, events, log, context, clock, polled=sources, tracing=tracing)
