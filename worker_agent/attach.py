"""`worker-agent attach` put together: an engine that runs elsewhere, brought into the fleet, while this process runs.

    what of it        comes from                                                   goes to
    ---------------   ----------------------------------------------------------   ------------------------------------
    KV events         its ZMQ frames and replays, or POST /kv_cache_events         its streams in the log, heartbeats
    load              its /metrics                                                 load reports
    what it is        configuration, and beyond that what it says (`core/          `WorkerRegistered`, while its /health
                      engine_facts.py`), asked anew before it is registered        answers
    requests          routers                                                      the engine itself; or here, and from
                                                                                   here to it (`forwarder.py`: when)

Without an address of the engine there are only streams. With one, what must be known before a stream can begin (model
and block size) is configured, or waited for until the engine is healthy.
"""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version

import structlog
import zmq.asyncio

from kv_protocol.fleet import WorkerRegistered
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.config import ConfigurationError
from kv_runtime.event_log import EventLog, log_families
from kv_runtime.http import HttpServer
from kv_runtime.supervise import Part, run_parts, until
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.text import Text, load_text
from worker_agent.attach_metrics import AttachMetrics
from worker_agent.attached import Describe, HealthWatch
from worker_agent.consolidator_metrics import ConsolidatorMetrics
from worker_agent.core.engine_facts import EngineFacts
from worker_agent.engine_client import EngineClient
from worker_agent.engine_loads import EngineLoads
from worker_agent.engine_survey import EngineSurvey
from worker_agent.event_streams import EventStreams
from worker_agent.foreign import attached_facts, foreign_registration
from worker_agent.foreign_config import AttachSettings, WorkerHeadSection
from worker_agent.forwarder import Forwarder
from worker_agent.membership import Membership
from worker_agent.polled_events import PolledEvents
from worker_agent.status import StatusApi

_STREAMS_DRAIN_S = 10.0
_WAIT_S = 1.0
_LAST_STAGE = 7
_NOTHING = EngineFacts()

_log = structlog.get_logger("attach")


async def run_attached(settings: AttachSettings, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Speak for the engine until `stop` is set; `say` is told where its status can be read.

    Raises:
        ConfigurationError: what is configured may not be, or not of this engine.
    """
    engine, instance, clock = settings.engine, uuid.uuid4().hex[:16], SystemClock()
    async with AsyncExitStack() as cleanup:
        if not engine.base_url:
            streams = settings.streams(instance, model=_model(settings, _NOTHING))
            await _run(settings, _NOTHING, streams, None, stop, clock, cleanup, say)
            return
        text = load_text(engine.text)
        base_url = engine.base_url.rstrip("/")
        foreign_registration(settings, attached_facts(engine, _NOTHING), text, instance, base_url)  # checked early
        client = await cleanup.enter_async_context(EngineClient(base_url, api_key=engine.api_key.get_secret_value()))
        survey = EngineSurvey(engine.kind, client, metrics_path=engine.metrics_path)
        said = await _first_said(settings, survey, clock, stop)
        if said is not None:
            facts = attached_facts(engine, said)
            streams = settings.streams(instance, model=_model(settings, facts), block_size=facts.block_size)
            await _run(settings, facts, streams, (client, survey, text), stop, clock, cleanup, say)


def _model(settings: AttachSettings, facts: EngineFacts) -> str:
    model = settings.engine.model or next(iter(facts.served_names), "")
    if not model:
        raise ConfigurationError(["engine.model: found '', allowed the model's name (--model)"])
    return model


async def _first_said(
    settings: AttachSettings, survey: EngineSurvey, clock: Clock, stop: asyncio.Event
) -> EngineFacts | None:
    """Return what the engine says, nothing if it is not needed and not to be had; None once `stop` is set."""
    needs_none = bool(settings.engine.model and settings.engine.block_size)
    is_told = False
    while not stop.is_set():
        said = await survey.ask()
        if said is not None or needs_none:
            return said or _NOTHING
        if not is_told:
            _log.warning("waiting_for_engine", url=settings.engine.base_url, needed="model and block size")
            is_told = True
        await until(stop, clock.sleep(_WAIT_S))
    return None


Asked = tuple[EngineClient, EngineSurvey, Text]


async def _run(
    settings: AttachSettings,
    facts: EngineFacts,
    worker: WorkerHeadSection,
    asked: Asked | None,
    stop: asyncio.Event,
    clock: Clock,
    cleanup: AsyncExitStack,
    say: Callable[[str], None],
) -> None:
    log_found, control, watch = asyncio.Event(), settings.control, None
    log = await EventLog.connect(
        settings.nats.url,
        name=f"worker-agent {worker.id}",
        token=settings.nats.credentials.get_secret_value(),
        on_found=log_found.set,
    )
    cleanup.push_async_callback(log.close)
    context = zmq.asyncio.Context()
    cleanup.callback(context.destroy, linger=0)
    streams = EventStreams(worker, settings.events, log, context, clock, polled=_polled(settings))
    parts = streams.parts(first_stage=2)
    loads, forwarder, client = None, None, None
    if asked is not None:
        client, survey, text = asked
        loads = _loads(settings, facts, worker, client, log, clock)
        parts += [Part("engine-loads", loads.run, 2)] if loads is not None else []
        base_url = client.base_url
        if settings.engine.is_forwarded:
            forwarder = await cleanup.enter_async_context(_forwarder(settings, base_url))
            served = await _served(settings, forwarder)
            base_url = f"http://{settings.worker.advertised_host}:{served.port}"
            parts.append(Part("forwarder", served.run, 1))
        registration = foreign_registration(settings, facts, text, worker.instance, base_url)
        watch = HealthWatch(
            client,
            Membership(registration, log, clock, log_found),
            clock,
            log_found,
            describe=_describe(settings, survey, worker, text, base_url),
        )
        cleanup.push_async_callback(watch.leave, "stopped")
        parts.append(Part("health-watch", watch.run, 0))
    registry = new_registry()
    Projection(registry, ConsolidatorMetrics([streams.consolidator]).families)
    Projection(registry, AttachMetrics(worker.id, streams, client, watch, loads, forwarder).families)
    Projection(registry, lambda: log_families(log.statistics()))
    status = StatusApi([streams.consolidator], version("kv-router"))
    http = HttpServer(status.app(registry, token=control.token.get_secret_value()), control.host, control.port)
    await http.start()
    await streams.consolidator.start()
    say(f"streams of {worker.id}, status on http://{control.host}:{http.port}")
    parts += [Part("http", http.run, _LAST_STAGE), Part("event-log", log.run, _LAST_STAGE)]
    await run_parts(parts, stop=stop, drain_s=settings.worker.drain_s + _STREAMS_DRAIN_S)


def _polled(settings: AttachSettings) -> PolledEvents | None:
    engine = settings.engine
    return PolledEvents(engine.base_url, api_key=engine.api_key.get_secret_value()) if engine.is_polled else None


def _loads(
    settings: AttachSettings,
    facts: EngineFacts,
    worker: WorkerHeadSection,
    client: EngineClient,
    log: EventLog,
    clock: Clock,
) -> EngineLoads | None:
    engine = settings.engine
    if not engine.metrics_path:
        return None
    return EngineLoads(
        engine.kind,
        client,
        log,
        clock,
        model=worker.model,
        worker_id=worker.id,
        instance=worker.instance,
        dp_ranks=worker.dp_ranks,
        block_size=worker.block_size,
        total_blocks=facts.total_kv_blocks,
        metrics_path=engine.metrics_path,
        poll_s=engine.metrics_poll_s,
    )


def _forwarder(settings: AttachSettings, base_url: str) -> Forwarder:
    return Forwarder(
        base_url,
        api_key=settings.engine.api_key.get_secret_value(),
        dp_ranks=tuple(range(settings.engine.dp_ranks)),
        inflight_requests_max=settings.worker.inflight_requests_max,
    )


async def _served(settings: AttachSettings, forwarder: Forwarder) -> HttpServer:
    worker = settings.worker
    app = forwarder.app(token=worker.token.get_secret_value(), body_bytes_max=worker.body_bytes_max)
    server = HttpServer(app, worker.host, worker.port, drain_s=worker.drain_s, handler_cancellation=True)
    await server.start()
    return server


def _describe(
    settings: AttachSettings, survey: EngineSurvey, worker: WorkerHeadSection, text: Text, base_url: str
) -> Describe:
    """Return what asks the engine anew what it is, and says why it cannot join as it is."""

    async def describe() -> WorkerRegistered | None:
        said = await survey.ask()
        if said is None:
            return None
        if said.block_size not in (0, worker.block_size):
            _log.error("engine_has_another_block_size", found=said.block_size, allowed=worker.block_size)
            return None
        if said.dp_ranks not in (0, settings.engine.dp_ranks):
            _log.warning("engine_has_other_ranks", found=settings.engine.dp_ranks, allowed=said.dp_ranks)
        facts = attached_facts(settings.engine, said)
        told = foreign_registration(settings, facts, text, worker.instance, base_url)
        if told.model != worker.model:
            _log.error("engine_has_another_model", found=told.model, allowed=worker.model)
            return None
        return told

    return describe
