"""Builds consolidators of external publishers, and an attached engine's registration."""

import secrets
from collections.abc import Mapping
from importlib.metadata import version

import zmq.asyncio

from kv_protocol.errors import LimitExceeded
from kv_protocol.fleet import NO_EVENTS, EventSource, WorkerRegistered
from kv_protocol.hashing import EAGLE_HASH_SCHEME, HASH_SCHEME, canary
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog
from kv_runtime.text.model import Text
from kv_runtime.tracing.service import EventTracing
from worker_agent.config import StreamsSection
from worker_agent.engines.attached.config import (
    BLOCK_SIZES,
    AttachedEngineSection,
    AttachSettings,
    PublisherSection,
    WorkerHeadSection,
    WorkerStreamsSection,
)
from worker_agent.engines.attached.facts import EngineFacts
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_event_subscriber import EngineEventSubscriber
from worker_agent.events.publisher_addresses import checked_endpoint
from worker_agent.events.source_cursor import SourceCursor
from worker_agent.load.engine_metrics import EngineKind

_EVENT_SOURCES: Mapping[EngineKind, EventSource] = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "trtllm"}


def new_epoch() -> int:
    """Return a random epoch for a stream; never 0."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def foreign_consolidator(
    worker: WorkerHeadSection,
    events: StreamsSection,
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: Clock,
    tracing: EventTracing | None = None,
) -> Consolidator:
    """Return the consolidator of the worker's streams, with a subscriber for each of its publishers, if it has any."""
    publishers = worker.publishers if isinstance(worker, WorkerStreamsSection) else ()
    core = Consolidation(
        worker.dp_ranks,
        worker.block_size,
        worker.instance or secrets.token_hex(8),
        new_epoch,
        origins=[Origin(each.source, each.dp_rank) for each in publishers],
        is_eagle=worker.is_eagle,
        outbox_bytes_max=events.outbox_bytes_max,
        ring_bytes_max=events.batch_ring_bytes_max,
    )
    readers = [_reader(publisher, context, clock) for publisher in publishers]
    return Consolidator(
        core,
        readers,
        log,
        clock,
        model=worker.model,
        worker_id=worker.id,
        source_stale=None if publishers else lambda _: NO_EVENTS,
        tracing=tracing,
    )


def _reader(publisher: PublisherSection, context: zmq.asyncio.Context, clock: Clock) -> EngineEventSubscriber:
    replay = publisher.replay_endpoint
    return EngineEventSubscriber(
        Origin(publisher.source, publisher.dp_rank),
        SourceCursor(has_replay=bool(replay)),
        context,
        clock,
        publish_endpoint=checked_endpoint("endpoint", publisher.endpoint, allow_remote=publisher.allow_remote),
        replay_endpoint=replay and checked_endpoint("replay_endpoint", replay, allow_remote=publisher.allow_remote),
        topic=publisher.topic,
    )


def attached_facts(engine: AttachedEngineSection, reported: EngineFacts) -> EngineFacts:
    """Return the configured facts, completed with the engine's reported ones.

    Raises:
        ConfigurationError: the reported block size differs from the configured one: no block would fit.
    """
    if engine.block_size and reported.block_size and engine.block_size != reported.block_size:
        raise ConfigurationError(
            [f"engine.block_size: found {engine.block_size}, allowed {reported.block_size}, which is the engine's"]
        )
    configured = EngineFacts(
        served_names=engine.served_names or ((engine.model,) if engine.model else ()),
        block_size=engine.block_size,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_seq_len,
        api_endpoints=engine.api_endpoints,
    )
    return configured.with_more(reported).with_more(EngineFacts(block_size=BLOCK_SIZES[engine.engine_kind]))


def foreign_registration(
    settings: AttachSettings, facts: EngineFacts, text: Text, instance: str, base_url: str
) -> WorkerRegistered:
    """Return the registration of the attached engine, whose requests go to `base_url`.

    Raises:
        ConfigurationError: a field is invalid.
    """
    engine = settings.engine
    scheme = EAGLE_HASH_SCHEME if engine.is_eagle else HASH_SCHEME
    try:
        return WorkerRegistered(
            worker_id=settings.worker.id,
            instance=instance,
            model=engine.model or next(iter(facts.served_names), ""),
            served_names=facts.served_names,
            role=settings.worker.role,
            base_url=base_url,
            dp_ranks=tuple(range(engine.dp_ranks)),
            block_size=facts.block_size,
            hash_scheme=scheme,
            tokenizer_digest=text.tokenizer_digest,
            template_digest=text.template_digest,
            canary=canary(facts.block_size, scheme),
            total_kv_blocks=facts.total_kv_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_seq_len=facts.max_seq_len,
            loras=facts.loras,
            taints=settings.worker.taints,
            transfer_domain=settings.worker.transfer_domain,
            event_source=_EVENT_SOURCES[engine.engine_kind],
            accepts_token_ids=engine.is_forwarded,
            version=facts.version or version("kv-router"),
            endpoint=settings.worker.endpoint_name,
            api_endpoints=facts.api_endpoints or DEFAULT_ENDPOINTS,
            stream_token_ids=_stream_token_ids(engine, facts.api_endpoints or DEFAULT_ENDPOINTS),
        )
    except LimitExceeded as error:
        raise ConfigurationError([f"engine.{error}"]) from error


def _stream_token_ids(engine: AttachedEngineSection, api_endpoints: tuple[str, ...]) -> str:
    """Return in whose words the engine tells the token ids of streams; empty: it is not to be asked.

    vLLM continues streams at its completions endpoint. A vLLM before 0.10.2 ignores the wish, and tells none. SGLang
    refuses the wish in streams of chats with 400. Source: `docs/ENGINES.md`.
    """
    tells = engine.engine_kind == "vllm" and engine.stream_token_ids and "completions" in api_endpoints
    return "vllm" if tells else ""
