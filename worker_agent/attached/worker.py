"""An engine that runs in another process, represented in the fleet while `AttachedWorker.run` runs.

    what              comes from                                                   goes to
    ---------------   ----------------------------------------------------------   ------------------------------------
    KV events         its ZMQ frames and replays, or POST /kv_cache_events         its streams in the log, heartbeats
    load              its /metrics                                                 load reports
    description       configuration, then the engine's HTTP answers                `WorkerRegistered`, while its /health
                      (`client.py`), before each registration                      answers
    requests          routers                                                      the engine, directly or forwarded by
                                                                                   this process (`api/forwarder.py`)

Without the engine's address only its streams are published. With it, the worker waits for the engine's
answers, unless model, block size, text and kind are all configured.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import structlog
import zmq.asyncio
from msgspec.structs import replace

from kv_protocol.fleet import NO_EVENTS, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog
from kv_runtime.http.hosts import url_of
from kv_runtime.supervise import Part, run_parts, until
from kv_runtime.telemetry import Family, by_name, counter, gauge
from kv_runtime.text.byte_model import BYTE_MODEL, ByteText
from kv_runtime.text.loading import local_directory
from kv_runtime.text.model import Text
from kv_runtime.tracing.service import Tracing, events_of
from worker_agent.api.forwarder import Forwarder
from worker_agent.api.in_flight import RequestOutcome, worker_tracer
from worker_agent.attached.client import EngineClient
from worker_agent.attached.config import AttachSettings, completed_facts, engine_registration
from worker_agent.attached.watch import EngineLoads, HealthWatch
from worker_agent.engines.servers.base import NO_EVENTS_ENDPOINT, EngineFacts
from worker_agent.events.consolidator import Consolidator, WorkerStreams, event_path
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.source_poller import Source
from worker_agent.fleet.membership import Membership
from worker_agent.fleet.worker_id import WorkerId
from worker_agent.metrics import engine_event_families, event_threads, poll_families, thread_family

_STREAMS_DRAIN_S = 10.0  # time that a stop may take beyond that of requests
_WAIT_S = 1.0
_ONLY_A_NAME = EngineFacts(served_names=("model",))
"""Replaces an engine's answer while settings are checked before the engine answers."""
_PROBED_TEXT = "What is 2 + 2?"
_FORWARDED: tuple[RequestOutcome, ...] = ("ok", "refused", "failed", "cut", "cancelled")

_log = structlog.get_logger("attach")


class Host(NamedTuple):
    """What the attached workers of one process share."""

    log: EventLog
    context: zmq.asyncio.Context
    clock: Clock
    gate: FleetGate
    load_text: Callable[[str], Text]
    tracing: Tracing | None = None


def check(settings: AttachSettings) -> None:
    """Raise `ConfigurationError` for settings that are wrong with any engine."""
    engine = settings.engine
    if not engine.base_url and not engine.model:
        raise ConfigurationError(["engine.model: found '', allowed the model's name (--model)"])
    if engine.base_url:
        facts = completed_facts(settings.settled(_ONLY_A_NAME).engine, _ONLY_A_NAME)
        engine_registration(settings.settled(_ONLY_A_NAME), facts, ByteText(), "checked", engine.base_url.rstrip("/"))


async def reported_facts(settings: AttachSettings) -> EngineFacts | None:
    """Return what the engine says of itself; None while it is not healthy."""
    async with _client(settings) as client:
        return await client.query()


def _client(settings: AttachSettings) -> EngineClient:
    engine = settings.engine
    return EngineClient(
        engine.base_url,
        api_key=engine.api_key.get_secret_value(),
        kind="" if engine.kind == "auto" else engine.kind,
        metrics_path=engine.metrics_path,
    )


class _Engine(NamedTuple):
    """An engine that has an address."""

    client: EngineClient
    facts: EngineFacts
    text: Text


class AttachedWorker:
    """A worker of the fleet for one engine in another process.

    `report` receives a line, with what the engine stated and what is assumed, and the model's name.
    """

    def __init__(self, settings: AttachSettings, host: Host, report: Callable[[str, str], None]) -> None:
        self._settings = settings.model_copy(update={"worker": settings.worker.identified()})
        self._given, self._host, self._report = settings.engine, host, report
        self._instance = uuid.uuid4().hex[:16]
        self._facts = EngineFacts()  # the newest that the engine stated
        self._streams: Consolidator | None = None
        self._client: EngineClient | None = None
        self._loads: EngineLoads | None = None
        self._forwarder: Forwarder | None = None
        self._membership: Membership | None = None

    @property
    def worker_id(self) -> str:
        """The id in the fleet."""
        return self._settings.worker.id

    @property
    def drain_s(self) -> float:
        """How long a stop may take."""
        return self._settings.worker.drain_s + _STREAMS_DRAIN_S

    @property
    def consolidators(self) -> tuple[Consolidator, ...]:
        """The consolidator of its streams, once the engine is known."""
        return () if self._streams is None else (self._streams,)

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the parts that exist, except the event streams' (`consolidators`)."""
        if self._streams is None:
            return
        worker = self.worker_id
        requests = {} if self._client is None else self._client.requests_total
        samples = [((worker, *question), count) for question, count in requests.items()]
        meaning = "Requests of the agent to the engine's HTTP endpoint, by outcome"
        yield counter("engine_questions", meaning, ("worker", "what", "outcome"), samples)
        if self._loads is not None:
            yield from self._loads.families()
        if self._forwarder is not None:
            outcomes = by_name((worker,), {each: self._forwarder.in_flight.ended[each] for each in _FORWARDED})
            meaning = "Requests forwarded to the engine, by outcome"
            yield counter("forwarded_requests", meaning, ("worker", "outcome"), outcomes)
            running = [((worker,), self._forwarder.in_flight.running)]
            yield gauge("forwarded_inflight_requests", "Requests being forwarded now", ("worker",), running)
        if self._streams.poller is not None:
            yield from engine_event_families(worker, self._streams.poller.source.rules)
            yield from poll_families(worker, self._streams)
            yield thread_family(worker, event_threads(self._streams))
        if self._membership is not None:
            meaning = "1 while the worker is registered because the engine is healthy"
            yield gauge("engine_attached", meaning, ("worker",), [((worker,), self._membership.is_registered)])
            yield from self._membership.families()

    async def run(self, stop: asyncio.Event) -> None:
        """Represent the engine until `stop` is set.

        Raises:
            ConfigurationError: the configuration is invalid, or contradicts the engine.
            TextError: the model's directory cannot be read.
            WorkerIdTaken: another living worker has the id.
        """
        async with AsyncExitStack() as cleanup:
            engine = await self._found(stop, cleanup)
            if engine is None and self._settings.engine.base_url:
                return
            parts = await self._parts(engine, stop, cleanup)
            await run_parts(parts, stop=stop, drain_s=self.drain_s)

    async def _found(self, stop: asyncio.Event, cleanup: AsyncExitStack) -> _Engine | None:
        """Return the engine, and settle the settings by what it says; None without an address, or on `stop`."""
        settings = self._settings.engine
        if not settings.base_url:
            self._settings = self._settings.settled(EngineFacts())
            return None
        text = await self._loaded(settings.text) if settings.text else None
        client = await cleanup.enter_async_context(_client(self._settings))
        reported = await self._first_facts(client, stop)
        if reported is None:
            return None
        self._settings = self._settings.settled(reported)
        if self._settings.engine.publish_endpoint == NO_EVENTS_ENDPOINT:
            flag = self._settings.engine.server.event_flag
            _log.warning("engine_publishes_no_events", worker=self.worker_id, flag=flag)
        facts = completed_facts(self._settings.engine, reported)
        text = text or await self._loaded(self._directory(facts))
        await self._check_text(client, facts, text)
        return _Engine(client, facts, text)

    async def _first_facts(self, client: EngineClient, stop: asyncio.Event) -> EngineFacts | None:
        """Return the engine's facts; empty if it does not answer and none is needed; None once `stop` is set."""
        engine = self._settings.engine
        needs_none = bool(engine.model and engine.block_size and engine.text and engine.kind != "auto")
        is_logged = False
        while not stop.is_set():
            facts = await client.query()
            if facts is not None and not client.kind:
                raise ConfigurationError(
                    ["engine.kind: found no owned_by of a known engine at /v1/models, allowed --engine: which it is"]
                )
            if facts is not None or needs_none:
                return facts or EngineFacts()
            if not is_logged:
                _log.warning("waiting_for_engine", worker=self.worker_id, url=engine.base_url)
                is_logged = True
            await self._host.clock.wait(stop, _WAIT_S)
        return None

    async def _loaded(self, directory: str) -> Text:
        return await asyncio.to_thread(self._host.load_text, directory)

    def _directory(self, facts: EngineFacts) -> str:
        directory = local_directory(facts.directory)
        if not directory:
            found = f"{facts.directory!r} of the engine, which cannot be read here" if facts.directory else "none"
            raise ConfigurationError([f"engine.text: found {found}, allowed the model's directory: --text DIR"])
        return directory

    async def _check_text(self, client: EngineClient, facts: EngineFacts, text: Text) -> None:
        """Raise `ConfigurationError` if the text is `byte`, but the engine tokenizes a prompt otherwise."""
        if self._settings.engine.text != BYTE_MODEL or "/tokenize" not in facts.api_endpoints:
            return
        ids = await client.token_ids(_PROBED_TEXT, facts.served_names[0])
        if ids is not None and ids != text.encode(_PROBED_TEXT, add_special_tokens=False):
            raise ConfigurationError(
                [f"engine.text: found {BYTE_MODEL!r}, allowed the directory of {facts.served_names[0]}: --text DIR"]
            )

    async def _parts(self, engine: _Engine | None, stop: asyncio.Event, cleanup: AsyncExitStack) -> list[Part]:
        """Return the parts to run; requests and recovery questions are accepted from now on."""
        settings, host = self._settings, self._host
        facts = EngineFacts() if engine is None else engine.facts
        model = settings.engine.model or next(iter(facts.served_names), "")
        if not model:
            raise ConfigurationError(["engine.model: found '', allowed the model's name (--model)"])
        worker = settings.streams(self._instance, model, facts.block_size)
        worker_id = WorkerId(host.log, host.clock, host.gate, worker_id=worker.id, instance=worker.instance)
        if engine is not None:
            await until(stop, worker_id.check())
        events, source = settings.events, None
        if engine is not None and settings.engine.is_polled:
            rules = TrtllmRules(worker.block_size, attention_window=events.attention_window or None)
            source = Source(lambda _, timeout_s: engine.client.kv_events(timeout_s), rules)
        streams = event_path(
            worker,
            source,
            events.sources,
            host.log,
            host.context,
            host.clock,
            ring_bytes_max=events.batch_ring_bytes_max,
            tracing=events_of(host.tracing),
            stale="" if source or worker.publishers else NO_EVENTS,
        )
        await streams.start()
        others = [] if engine is None else await self._fronted(engine, worker, worker_id, cleanup)
        self._streams = streams
        self._report(f"{worker.id}{self._summary(worker, facts)}", worker.model)
        return [*streams.parts(first_stage=2), *others]

    def _summary(self, worker: WorkerStreams, facts: EngineFacts) -> str:
        engine, given = self._settings.engine, self._given
        if not engine.base_url:
            return ""
        is_assumed = not (given.publish_endpoint or facts.publish_endpoint) and not engine.is_polled
        return (
            f": {engine.server.name} {facts.version or '(version unknown)'} at {engine.base_url}, model {worker.model},"
            f" blocks of {worker.block_size}, ranks: {len(worker.dp_ranks)},"
            f" KV events: {engine.publish_endpoint}{' (assumed)' if is_assumed else ''}"
        )

    async def _fronted(
        self, engine: _Engine, worker: WorkerStreams, worker_id: WorkerId, cleanup: AsyncExitStack
    ) -> list[Part]:
        """Return the parts that watch and front the engine; forwarded requests are accepted from now on.

        `cleanup` publishes `WorkerLeft`. Do what can fail before the forwarder starts: only its part stops it.
        """
        settings, host, parts = self._settings, self._host, list[Part]()
        self._client, base_url = engine.client, engine.client.base_url
        registration = engine_registration(settings, engine.facts, engine.text, worker.instance, base_url)
        if settings.engine.metrics_path:
            total_blocks = engine.facts.total_kv_blocks
            self._loads = EngineLoads(engine.client, host.log, host.clock, worker, total_blocks=total_blocks)
            parts.append(Part("engine-loads", self._loads.run, 2))
        if settings.engine.is_forwarded:
            section = settings.worker
            forwarder = self._forwarder = Forwarder(
                base_url,
                api_key=settings.engine.api_key.get_secret_value(),
                dp_ranks=worker.dp_ranks,
                rank_header=settings.engine.server.rank_header,
                inflight_requests_max=section.inflight_requests_max,
                tracer=worker_tracer(host.tracing, worker.id, section.role, worker.model),
            )
            app = forwarder.app(token=section.token.get_secret_value(), body_bytes_max=section.body_bytes_max)
            served = section.server(app)
            await served.start()
            base_url = url_of(section.advertised_host, served.port)
            parts.append(Part("forwarder", served.run, 1, lambda: {"requests": forwarder.in_flight.running}))
            registration = replace(registration, base_url=base_url)
        membership = self._membership = Membership(registration, worker_id, host.clock)
        watch = HealthWatch(
            engine.client,
            membership,
            host.clock,
            describe=partial(self._described, engine, worker, base_url, membership),
            is_asleep=lambda: self._loads is not None and self._loads.is_asleep,
        )
        cleanup.push_async_callback(membership.leave, "stopped")
        return [*parts, Part("health-watch", watch.run, 0), Part("membership", membership.run, 0)]

    async def _described(
        self, engine: _Engine, worker: WorkerStreams, base_url: str, membership: Membership
    ) -> WorkerRegistered | None:
        """Return the registration of the engine as it is now; return None, and log why, if it cannot join.

        If the engine was healthy since it was registered, only names and adapters are read again.
        """
        settings = self._settings
        reported = await engine.client.query(self._facts if membership.is_registered else None)
        if reported is None:
            return None
        self._facts = reported
        if reported.block_size not in (0, worker.block_size):
            _log.error("engine_has_another_block_size", found=reported.block_size, allowed=worker.block_size)
            return None
        if reported.dp_ranks not in (0, settings.engine.dp_ranks):
            _log.warning("engine_has_other_ranks", found=settings.engine.dp_ranks, allowed=reported.dp_ranks)
        facts = completed_facts(settings.engine, reported)
        registration = engine_registration(settings, facts, engine.text, worker.instance, base_url)
        if registration.model != worker.model:
            _log.error("engine_has_another_model", found=registration.model, allowed=worker.model)
            return None
        return registration
