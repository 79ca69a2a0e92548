"""Builds a worker's consolidator with its poller and its subscribers, and ends what never ran."""

import asyncio
import secrets
from collections.abc import Iterable
from typing import NamedTuple

import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, run_parts
from kv_runtime.tracing.service import EventTracing
from worker_agent.events.consolidation import SOLE, Consolidation
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber, PublisherAddress
from worker_agent.events.publishers import PublisherSection
from worker_agent.events.source_poller import Source

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


async def end_unrun(parts: Iterable[Part]) -> None:
    """Run the parts with `stop` set, so that they close their sockets and end.

    A ZeroMQ context cannot be destroyed before all its sockets are closed, and the parts own these sockets.
    """
    stop = asyncio.Event()
    stop.set()
    await run_parts(parts, stop=stop, drain_s=_END_S)


def event_path(
    worker: WorkerStreams,
    source: Source | None,
    configured: Iterable[PublisherSection],
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: Clock,
    *,
    ring_bytes_max: int,
    tracing: EventTracing | None = None,
    stale: str = "",
) -> Consolidator:
    """Return the consolidator of a worker, whose streams have new epochs.

    `source`: its engine, if that is polled; `configured` are further publishers.

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
        origins=[*([] if source is None else [SOLE]), *(each.origin for each in published)],
        is_eagle=worker.is_eagle,
        ring_bytes_max=ring_bytes_max,
    )
    return Consolidator(
        core,
        [EngineEventSubscriber(each, context, clock) for each in published],
        log,
        clock,
        model=worker.model,
        worker_id=worker.id,
        source=source,
        tracing=tracing,
        stale=stale,
    )
