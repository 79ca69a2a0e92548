"""`worker-agent attach`: brings an engine that runs in another process into the fleet, while this process runs.

    what              comes from                                                   goes to
    ---------------   ----------------------------------------------------------   ------------------------------------
    KV events         its ZMQ frames and replays, or POST /kv_cache_events         its streams in the log, heartbeats
    load              its /metrics                                                 load reports
    description       configuration, then the engine's HTTP answers                `WorkerRegistered`, while its /health
                      (`engines/attached/facts.py`), before each registration      answers
    requests          routers                                                      the engine, directly or forwarded by
                                                                                   this process (`api/forwarder.py`)

Without the engine's address this process only publishes streams. With it, the facts that a stream needs (model and
block size) are configured, or the process waits for them until the engine is healthy.
"""

import asyncio
import os
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import NamedTuple

import structlog
import zmq.asyncio

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog, log_families
from kv_runtime.http.connection_limit import CONTROL_CONNECTIONS_MAX
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part, run_parts, until
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from kv_runtime.tracing.exporter import span_families
from kv_runtime.tracing.service import Tracing, events_of, opened_event_tracing, opened_tracing
from worker_agent.api.forwarder import Forwarder
from worker_agent.api.status import StatusApi
from worker_agent.api.tracing import SERVICE, worker_tracer
from worker_agent.commands.unrun import end_unrun
from worker_agent.engines.attached.client import EngineClient
from worker_agent.engines.attached.config import AttachSettings, WorkerHeadSection
from worker_agent.engines.attached.consolidators import attached_facts, foreign_registration
from worker_agent.engines.attached.facts import EngineFacts
from worker_agent.engines.attached.health import Describe, HealthWatch
from worker_agent.engines.attached.metrics import AttachMetrics
from worker_agent.engines.attached.survey import EngineSurvey
from worker_agent.events.attached_streams import EventStreams
from worker_agent.events.metrics import ConsolidatorMetrics
from worker_agent.events.polled_events import PolledEvents
from worker_agent.fleet.membership import Membership
from worker_agent.fleet.worker_id import WorkerId
from worker_agent.load.attached import EngineLoads

_STREAMS_DRAIN_S = 10.0
_WAIT_S = 1.0
_LAST_STAGE = 7
_NOTHING = EngineFacts()
_ONLY_A_NAME = EngineFacts(served_names=("model",))
"""Stands for an engine's answer while settings are checked before the engine answers."""

_log = structlog.get_logger("attach")


class _EngineAccess(NamedTuple):
    """Access to an engine that has an address: HTTP client, survey, and the model's text."""

    client: EngineClient
    survey: EngineSurvey
    text: Text


async def run_attached(settings: AttachSettings, stop: asyncio.Event, report: Callable[[str], None]) -> None:
    """Represent the engine until `stop` is set; `report` receives the address of the status page.

    Raises:
        ConfigurationError: the configuration is invalid, or contradicts the engine.
        WorkerIdTaken: another living worker has the id.
    """
    settings = settings.model_copy(update={"worker": settings.worker.identified()})
    engine, instance, clock = settings.engine, uuid.uuid4().hex[:16], SystemClock()
    async with AsyncExitStack() as cleanup:
        if not engine.base_url:
            streams = settings.streams(instance, model=_model(settings, _NOTHING))
            await _run(settings, _NOTHING, streams, None, stop, clock, cleanup, report)
            return
        text = load_text(engine.text)
        base_url = engine.base_url.rstrip("/")
        foreign_registration(settings, attached_facts(engine, _ONLY_A_NAME), text, instance, base_url)  # checked early
        client = await cleanup.enter_async_context(EngineClient(base_url, api_key=engine.api_key.get_secret_value()))
        survey = EngineSurvey(engine.kind, client, metrics_path=engine.metrics_path)
        reported = await _first_facts(settings, survey, clock, stop)
        if reported is not None:
            facts = attached_facts(engine, reported)
            streams = settings.streams(instance, model=_model(settings, facts), block_size=facts.block_size)
            await _run(settings, facts, streams, _EngineAccess(client, survey, text), stop, clock, cleanup, report)


def _model(settings: AttachSettings, facts: EngineFacts) -> str:
    model = settings.engine.model or next(iter(facts.served_names), "")
    if not model:
        raise ConfigurationError(["engine.model: found '', allowed the model's name (--model)"])
    return model


async def _first_facts(
    settings: AttachSettings, survey: EngineSurvey, clock: Clock, stop: asyncio.Event
) -> EngineFacts | None:
    """Return the engine's facts; empty if it does not answer and none is needed; None once `stop` is set."""
    needs_none = bool(settings.engine.model and settings.engine.block_size)
    is_logged = False
    while not stop.is_set():
        facts = await survey.query()
        if facts is not None or needs_none:
            return facts or _NOTHING
        if not is_logged:
            _log.warning("waiting_for_engine", url=settings.engine.base_url, needed="model and block size")
            is_logged = True
        await until(stop, clock.sleep(_WAIT_S))
    return None


class _Attached(NamedTuple):
    """The shared parts of the process."""

    settings: AttachSettings
    facts: EngineFacts
    worker: WorkerHeadSection
    access: _EngineAccess | None
    clock: Clock
    log: EventLog
    found: asyncio.Event
    """Set whenever the log was found again."""
    worker_id: WorkerId
    tracing: Tracing | None


class _Fronted(NamedTuple):
    """Health watch, membership, load reader and forwarder of an engine that has an address, and the parts to run."""

    watch: HealthWatch
    membership: Membership
    loads: EngineLoads | None
    forwarder: Forwarder | None
    parts: list[Part]


async def _run(
    settings: AttachSettings,
    facts: EngineFacts,
    worker: WorkerHeadSection,
    access: _EngineAccess | None,
    stop: asyncio.Event,
    clock: Clock,
    cleanup: AsyncExitStack,
    report: Callable[[str], None],
) -> None:
    found = asyncio.Event()
    log = await _connected(settings, worker, found, cleanup)
    gate = FleetGate(settings.nats.fleet_secrets)
    worker_id = WorkerId(log, clock, gate, worker_id=worker.id, instance=worker.instance)
    if access is not None:
        await until(stop, worker_id.check())
    context = zmq.asyncio.Context()
    cleanup.callback(context.destroy, linger=0)
    is_forwarded = access is not None and settings.engine.is_forwarded
    opened = opened_tracing if is_forwarded else opened_event_tracing
    tracing = opened(settings.tracing, os.environ, worker.instance, service=SERVICE)
    streams = EventStreams(
        worker, settings.events, log, context, clock, polled=_polled(settings), tracing=events_of(tracing)
    )
    parts = streams.parts(first_stage=2)
    attached = _Attached(settings, facts, worker, access, clock, log, found, worker_id, tracing)
    async with AsyncExitStack() as until_run:
        until_run.push_async_callback(end_unrun, parts)
        others = await _others(attached, streams, cleanup, report)
        until_run.pop_all()  # from here on the parts own the sockets
    await run_parts([*parts, *others], stop=stop, drain_s=settings.worker.drain_s + _STREAMS_DRAIN_S)


async def _others(
    attached: _Attached, streams: EventStreams, cleanup: AsyncExitStack, report: Callable[[str], None]
) -> list[Part]:
    """Return the parts to run beside the streams; requests and recovery questions are accepted from now on."""
    access, worker, log = attached.access, attached.worker, attached.log
    fronted = None if access is None else await _fronted(attached, access, cleanup)
    http = _status_http(attached, streams, fronted)
    await http.start()
    await streams.consolidator.start()
    report(f"streams of {worker.id}, status on http://{attached.settings.control.host}:{http.port}")
    parts = [] if fronted is None else fronted.parts
    spans = [] if attached.tracing is None else [attached.tracing.exporter.part(2)]
    return [*parts, *spans, Part("http", http.run, _LAST_STAGE, dict), Part("event-log", log.run, _LAST_STAGE)]


async def _connected(
    settings: AttachSettings, worker: WorkerHeadSection, found: asyncio.Event, cleanup: AsyncExitStack
) -> EventLog:
    log = await EventLog.connect(
        settings.nats.url,
        name=f"worker-agent {worker.id}",
        user=settings.nats.user,
        token=settings.nats.credentials.get_secret_value(),
        on_found=found.set,
    )
    cleanup.push_async_callback(log.close)
    return log


async def _fronted(attached: _Attached, access: _EngineAccess, cleanup: AsyncExitStack) -> _Fronted:
    """Build the parts that watch and front the engine; forwarded requests are accepted from now on."""
    settings, client = attached.settings, access.client
    parts, base_url, forwarder = list[Part](), client.base_url, None
    loads = _loads(attached, client)
    if loads is not None:
        parts.append(Part("engine-loads", loads.run, 2))
    if settings.engine.is_forwarded:
        forwarder = await cleanup.enter_async_context(_forwarder(attached, base_url))
        served = await _served(settings, forwarder)
        base_url = f"http://{settings.worker.advertised_host}:{served.port}"
        parts.append(Part("forwarder", served.run, 1, lambda: {"requests": forwarder.running}))
    membership = _membership(attached, access, base_url)
    watch = _health_watch(attached, access, membership, base_url, loads)
    cleanup.push_async_callback(watch.leave, "stopped")
    parts += [Part("health-watch", watch.run, 0), Part("worker-id", membership.watch, 0)]
    return _Fronted(watch, membership, loads, forwarder, parts)


def _membership(attached: _Attached, access: _EngineAccess, base_url: str) -> Membership:
    registration = foreign_registration(
        attached.settings, attached.facts, access.text, attached.worker.instance, base_url
    )
    return Membership(registration, attached.worker_id, attached.clock, attached.found)


def _health_watch(
    attached: _Attached, access: _EngineAccess, membership: Membership, base_url: str, loads: EngineLoads | None
) -> HealthWatch:
    settings, worker = attached.settings, attached.worker
    return HealthWatch(
        access.client,
        membership,
        attached.clock,
        attached.found,
        describe=_describe(settings, access.survey, worker, access.text, base_url),
        is_asleep=lambda: loads is not None and loads.is_asleep,
    )


def _status_http(attached: _Attached, streams: EventStreams, fronted: _Fronted | None) -> HttpServer:
    control, registry = attached.settings.control, new_registry()
    client = None if attached.access is None else attached.access.client
    watch, loads, forwarder = (
        (None, None, None) if fronted is None else (fronted.watch, fronted.loads, fronted.forwarder)
    )
    Projection(registry, ConsolidatorMetrics([streams.consolidator]).families)
    Projection(registry, AttachMetrics(attached.worker.id, streams, client, watch, loads, forwarder).families)
    Projection(registry, lambda: log_families(attached.log.statistics()))
    Projection(registry, lambda: span_families(None if attached.tracing is None else attached.tracing.exporter))
    if fronted is not None:
        Projection(registry, fronted.membership.families)
    sources = list if streams.path is None else streams.path.status
    status = StatusApi([streams.consolidator], version("kv-router"), sources=sources)
    app = status.app(registry, token=control.token.get_secret_value())
    return HttpServer(
        app, control.host, control.port, hosts=control.host_names(), connections_max=CONTROL_CONNECTIONS_MAX
    )


def _polled(settings: AttachSettings) -> PolledEvents | None:
    engine = settings.engine
    return PolledEvents(engine.base_url, api_key=engine.api_key.get_secret_value()) if engine.is_polled else None


def _loads(attached: _Attached, client: EngineClient) -> EngineLoads | None:
    engine, worker = attached.settings.engine, attached.worker
    if not engine.metrics_path:
        return None
    return EngineLoads(
        engine.kind,
        client,
        attached.log,
        attached.clock,
        model=worker.model,
        worker_id=worker.id,
        instance=worker.instance,
        dp_ranks=worker.dp_ranks,
        block_size=worker.block_size,
        total_blocks=attached.facts.total_kv_blocks,
        metrics_path=engine.metrics_path,
        poll_s=engine.metrics_poll_s,
        is_exported=engine.export_metrics,
    )


def _forwarder(attached: _Attached, base_url: str) -> Forwarder:
    settings, worker = attached.settings, attached.worker
    return Forwarder(
        base_url,
        api_key=settings.engine.api_key.get_secret_value(),
        dp_ranks=tuple(range(settings.engine.dp_ranks)),
        inflight_requests_max=settings.worker.inflight_requests_max,
        tracer=worker_tracer(attached.tracing, worker.id, settings.worker.role, worker.model),
    )


async def _served(settings: AttachSettings, forwarder: Forwarder) -> HttpServer:
    worker = settings.worker
    app = forwarder.app(token=worker.token.get_secret_value(), body_bytes_max=worker.body_bytes_max)
    server = HttpServer(
        app,
        worker.host,
        worker.port,
        hosts=worker.host_names(),
        drain_s=worker.drain_s,
        handler_cancellation=True,
    )
    await server.start()
    return server


def _describe(
    settings: AttachSettings, survey: EngineSurvey, worker: WorkerHeadSection, text: Text, base_url: str
) -> Describe:
    """Return a function that queries the engine again, and logs why it cannot join."""

    async def describe() -> WorkerRegistered | None:
        reported = await survey.query()
        if reported is None:
            return None
        if reported.block_size not in (0, worker.block_size):
            _log.error("engine_has_another_block_size", found=reported.block_size, allowed=worker.block_size)
            return None
        if reported.dp_ranks not in (0, settings.engine.dp_ranks):
            _log.warning("engine_has_other_ranks", found=settings.engine.dp_ranks, allowed=reported.dp_ranks)
        facts = attached_facts(settings.engine, reported)
        registration = foreign_registration(settings, facts, text, worker.instance, base_url)
        if registration.model != worker.model:
            _log.error("engine_has_another_model", found=registration.model, allowed=worker.model)
            return None
        return registration

    return describe
