"""`worker-agent serve`: runs an engine in this process, serves its requests and publishes its KV events and load.

    what                    comes from                               goes to
    ---------------------   --------------------------------------   ---------------------------------------------
    requests                routers, over HTTP                       the engine
    KV events               the engine, polled with                  its ranks' streams in the log, heartbeats
                            --publish-kv-events; `events.sources`,
                            subscribed (a KV block manager's tiers)
    load                    the engine's statistics, if enabled      load reports
    description             the engine, once it is loaded            `WorkerRegistered`, not before

    stop stages      0 membership (draining) and canary   1 HTTP: running requests get `worker.drain_s`
                     2 event and statistics polls         3 the engine: transfers, shutdown      .. 8 the log

If the engine dies, the process ends: response streams fail, the agent publishes `WorkerLeft`, and the rest drains.
"""

import asyncio
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

import zmq.asyncio

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, connected_log, log_families
from kv_runtime.http.hosts import url_of
from kv_runtime.main_thread import ThreadCall
from kv_runtime.supervise import Part, PartGaveUp, run_parts, until
from kv_runtime.telemetry import Family, LoopLag, Projection, by_name, counter, gauge, new_registry
from kv_runtime.text.chat_messages import TextError
from kv_runtime.tracing.service import events_of, opened_tracing, span_families
from worker_agent.api.app import AgentApi, streams_status
from worker_agent.api.completions import Completions
from worker_agent.api.encode_endpoint import EncodeApi
from worker_agent.api.in_flight import SERVICE, worker_tracer
from worker_agent.api.prompts import EnginePrompts
from worker_agent.attached.watch import labelled
from worker_agent.commands.engine_choice import EngineChoice, build_engine, engine_text
from worker_agent.config import AgentSettings
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.events.consolidator import Consolidator, WorkerStreams, event_path
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.source_poller import Source
from worker_agent.fleet.canary import CanaryWatch
from worker_agent.fleet.membership import Membership
from worker_agent.fleet.worker_id import WorkerId
from worker_agent.load.reports import LoadReports
from worker_agent.media.encode_client import EncodeClient
from worker_agent.media.image_models import ImageFacts, image_facts, image_rule
from worker_agent.media.loader import MediaLoader
from worker_agent.metrics import agent_families
from worker_agent.port.types import Engine, EngineStopped

_SWITCH_S = 0.0005
"""Interpreter switch interval: threads that translate events must not hold up the event loop, which streams answers."""
_ABORTS_S = 2.0
"""Time for a decode worker's aborted requests to fetch the blocks that a prefill worker holds for them."""


class ServedWorker:
    """A worker whose engine runs in this process; `call` runs the functions that build and end a TensorRT-LLM engine.

    Raises:
        EngineError: the engine cannot be loaded.
        ConfigurationError: a tracing setting is not allowed, or a package is missing.
        TextError: the model's text or images cannot be used.
    """

    def __init__(self, settings: AgentSettings, chosen: EngineChoice, call: ThreadCall = asyncio.to_thread) -> None:
        section = settings.worker.identified()
        self._settings, self._section, self._chosen = settings, section, chosen
        self._clock, self._text = Clock(), engine_text(settings, chosen)
        self._engine = build_engine(settings, chosen, self._text, self._clock, call)
        self._loader = MediaLoader(settings.media)
        path = chosen.text if chosen.takes_media else ""
        facts = image_facts(path, self._text, settings.images)
        self._image_rule = image_rule(path, facts, settings.images)
        self._encoders, self._encode_api = self._encode_client(), self._encode_endpoint(facts)
        self._prompts = EnginePrompts(self._text, self._loader, facts, self._encoders)
        self._instance = uuid.uuid4().hex[:16]
        name = f"{section.id}/{self._instance}"
        self._tracing = opened_tracing(settings.tracing, os.environ, name, service=SERVICE)

    def _encode_client(self) -> EncodeClient | None:
        """Return the client of encode workers; None if the engine encodes images itself, or takes none."""
        section, form = self._section, self._settings.encode.form
        if form == "none":
            return None
        if section.role not in ("aggregated", "prefill"):
            raise TextError("encode.form", form, f"none on a worker of role {section.role}: it computes no prompt")
        host, token = section.advertised_host if form == "handles" else "", section.token.get_secret_value()
        return EncodeClient(self._clock, model=self._chosen.names[0], form=form, host=host, token=token)

    def _encode_endpoint(self, facts: ImageFacts | None) -> EncodeApi | None:
        """Return the endpoint of an encode worker; None for another worker."""
        if self._section.role != "encode":
            return None
        if facts is None:
            allowed = "a model that takes images, or images.placeholder and images.token_id"
            raise TextError("role", self._section.role, allowed)
        return EncodeApi(
            self._engine,
            self._loader,
            facts,
            cache_bytes_max=self._settings.media.cache_bytes_max,
            served_names=self._chosen.names,
            inflight_requests_max=self._section.inflight_requests_max,
        )

    async def run(self, stop: asyncio.Event, report: Callable[[str], None]) -> None:
        """Serve until `stop` is set or the engine dies; `report` receives the address once the engine is loaded.

        Raises:
            EngineError: the engine cannot be loaded.
            WorkerIdTaken: another living worker has the id. If that is found after the engine was loaded, the worker
                has drained.
            PartGaveUp: the engine died; everything else has drained.
            BrokerUnavailable, PortUsed: another requirement of a worker is missing.
        """
        sys.setswitchinterval(_SWITCH_S)
        async with AsyncExitStack() as cleanup:
            name = f"worker-agent {self._section.id}"
            log = await cleanup.enter_async_context(connected_log(self._settings.nats, name, awaited_until=stop))
            gate = FleetGate(self._settings.nats.fleet_secrets)
            worker_id = WorkerId(log, self._clock, gate, worker_id=self._section.id, instance=self._instance)
            await until(stop, worker_id.check())
            context = zmq.asyncio.Context()
            cleanup.callback(context.destroy, linger=0)
            async with AsyncExitStack() as until_run:
                until_run.push_async_callback(self._engine.stop, 0.0)
                await until(stop, self._engine.start())
                if stop.is_set():
                    return
                rules, events = self._event_path(log, context)
                parts = await self._parts(log, worker_id, rules, events, cleanup, report)
                until_run.pop_all()  # from here on the part "engine-end" stops the engine
            await run_parts(parts, stop=stop, drain_s=self._settings.drain_s + _ABORTS_S)

    def _event_path(self, log: EventLog, context: zmq.asyncio.Context) -> tuple[TrtllmRules, Consolidator]:
        engine, chosen, described = self._engine, self._chosen, self._engine.describe()
        rules, buffered = TrtllmRules(described.block_size), chosen.event_buffer * len(described.dp_ranks)
        source = Source(lambda work, timeout_s: work.call(partial(engine.kv_events, timeout_s)), rules, buffered)
        return rules, event_path(
            WorkerStreams(self._section.id, chosen.names[0], self._instance, described.block_size, described.dp_ranks),
            source if chosen.polls_events else None,
            self._settings.events.sources,
            log,
            context,
            self._clock,
            ring_bytes_max=self._settings.events.batch_ring_bytes_max,
            tracing=events_of(self._tracing),
        )

    async def _parts(
        self,
        log: EventLog,
        worker_id: WorkerId,
        rules: TrtllmRules,
        events: Consolidator,
        cleanup: AsyncExitStack,
        report: Callable[[str], None],
    ) -> list[Part]:
        """Return the parts to run; requests are accepted from now on, and `cleanup` publishes `WorkerLeft`."""
        section, engine, clock, registry = self._section, self._engine, self._clock, new_registry()
        watch: CanaryWatch | None = None
        if wait_s := section.canary_wait_s:
            is_decode, begin_id = section.role == "decode", self._text.bos_id
            watch = CanaryWatch(engine, clock, wait_s=wait_s, begin_id=begin_id, is_decode=is_decode)
        api = self._api(events, watch)
        app = api.app(registry, token=section.token.get_secret_value(), body_bytes_max=section.body_bytes_max)
        if self._encode_api is not None:
            app.add_routes(self._encode_api.routes())
        http = section.server(app)
        await http.start()
        registration = self._registration(api, http.port)
        membership = Membership(registration, worker_id, clock)
        loads = LoadReports(engine, log, clock, registration, lambda: api.in_flight.running)
        exporter, encoders = None if self._tracing is None else self._tracing.exporter, self._encoders
        Projection(registry, partial(agent_families, section.id, rules, events, loads, api))
        Projection(registry, partial(served_families, section.id, engine, watch))
        Projection(registry, partial(media_families, section.id, self._loader, self._encoders, self._encode_api))
        Projection(registry, lambda: log_families(log.statistics()))
        Projection(registry, membership.families)
        Projection(registry, partial(span_families, exporter))
        await events.start()
        cleanup.push_async_callback(membership.leave, "stopped")
        report(f"worker {section.id} on {registration.base_url}")
        return [
            Part("membership", membership.run, 0),
            *([] if watch is None else [Part("canary", partial(watch.run, membership), 0)]),
            Part("http", http.run, 1, lambda: {"requests": api.in_flight.running}),
            *([] if encoders is None else [encoders.part(2, log, FleetGate(self._settings.nats.fleet_secrets))]),
            *([loads.work.part(stage=2)] if self._chosen.has_statistics else []),
            Part("loop-lag", LoopLag(registry, clock).run, 2),
            *events.parts(first_stage=2),
            *_engine_parts(engine, membership, stage=3),
            *([] if exporter is None else [exporter.part(2)]),
            Part("event-log", log.run, 8),
        ]

    def _api(self, events: Consolidator, watch: CanaryWatch | None) -> AgentApi:
        settings, section, engine, names = self._settings, self._section, self._engine, self._chosen.names
        completions = Completions(
            engine,
            self._text,
            self._prompts,
            served_names=names,
            default_max_tokens=settings.engine.default_max_tokens,
            clock=self._clock,
            role=section.role,
            loras=tuple(settings.trtllm.loras),
            body_limits=section.body_limits(),
            answer_format=settings.engine.answer_format,
            on_output=watch.on_output if watch is not None else lambda: None,
        )
        return AgentApi(
            completions,
            inflight_requests_max=section.inflight_requests_max,
            position=events.position,
            status=lambda: streams_status([events]),
            fault=lambda: engine.fault if isinstance(engine, TensorRTLLMEngine) else None,
            tracer=worker_tracer(self._tracing, section.id, section.role, names[0]),
        )

    def _registration(self, api: AgentApi, port: int) -> WorkerRegistered:
        section, engine, text, chosen = self._section, self._engine.describe(), self._text, self._chosen
        return WorkerRegistered(
            worker_id=section.id,
            instance=self._instance,
            model=engine.model,
            served_names=chosen.names,
            role=section.role,
            base_url=url_of(section.advertised_host, port),
            dp_ranks=engine.dp_ranks,
            block_size=engine.block_size,
            hash_scheme=HASH_SCHEME,
            tokenizer_digest=text.tokenizer_digest,
            template_digest=text.template_digest,
            canary=canary(engine.block_size),
            total_kv_blocks=engine.total_kv_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_seq_len=engine.max_seq_len,
            max_prompt_tokens=engine.max_prompt_tokens,
            loras=tuple(self._settings.trtllm.loras),
            taints=section.taints,
            transfer_domain=section.transfer_domain,
            event_source=engine.event_source if chosen.polls_events else "none",
            accepts_token_ids=True,
            version=engine.version,
            endpoint=section.endpoint_name,
            api_endpoints=api.api_endpoints,
            images=self._image_rule,
            kv_cache_dtype=engine.kv_cache_dtype,
            block_reuse=chosen.block_reuse,
            transfer_buffer_tokens=chosen.transfer_buffer_tokens,
            transfer_backend=chosen.transfer_backend,
        )


def _engine_parts(engine: Engine, membership: Membership, stage: int) -> list[Part]:
    """Return the two parts of the engine: one drives it until the other has stopped it.

    Begun transfers get time to end. If the engine dies, the first part withdraws the worker and raises `PartGaveUp`.
    """

    async def drive(_: asyncio.Event) -> None:
        try:
            await engine.run()
        except EngineStopped as error:
            membership.withdraw(str(error))
            raise PartGaveUp(str(error)) from error

    async def end(stop: asyncio.Event) -> None:
        await stop.wait()
        await engine.stop(_ABORTS_S)

    return [Part("engine", drive, stage), Part("engine-end", end, stage)]


def served_families(
    worker: str, engine: SimulatedEngine | TensorRTLLMEngine, canary: CanaryWatch | None
) -> Iterator[Family]:
    """Yield the families of the engine itself, made at each scrape; families of missing parts have no samples."""
    at = (worker,)
    trtllm = engine if isinstance(engine, TensorRTLLMEngine) else None
    load_s = [] if trtllm is None or trtllm.load_s is None else [(at, trtllm.load_s)]
    yield gauge("engine_load_seconds", "Time that loading the engine took", ("worker",), load_s)
    is_dead = [] if trtllm is None else [(at, trtllm.fault is not None)]
    yield gauge("engine_dead", "1 once TensorRT-LLM is known to be dead", ("worker",), is_dead)
    failed = [] if trtllm is None else [(at, trtllm.failed_requests_total)]
    meaning = "Requests that TensorRT-LLM itself refused or failed"
    yield counter("engine_failed_requests", meaning, ("worker",), failed)
    errors = [] if trtllm is None else by_name(at, trtllm.logits_errors_total)
    meaning = "Failed calls of a logits processor; the logits stayed unchanged"
    yield counter("logits_processor_errors", meaning, ("worker", "processor"), errors)
    if isinstance(engine, TensorRTLLMEngine):
        if engine.own_metrics is not None:
            yield from labelled(engine.own_metrics.families(), {"worker": worker})
    else:
        yield from _context_families(worker, engine)
    fetches = engine.fetches  # of TensorRT-LLM only those that failed, or that it measured
    yield counter("kv_transfers", "Fetches of KV, by outcome", ("worker", "outcome"), by_name(at, fetches.by_outcome))
    yield counter("kv_transfer_bytes", "Bytes of KV fetched", ("worker",), [(at, fetches.fetched_bytes)])
    meaning = "Duration of complete fetches, summed; of a simulated engine in simulated time"
    yield counter("kv_transfer_seconds", meaning, ("worker",), [(at, fetches.seconds)])
    outcomes = [] if canary is None else by_name(at, canary.requests_total)
    meaning = "Canary requests to the idle engine, by outcome"
    yield counter("engine_canaries", meaning, ("worker", "outcome"), outcomes)


def _context_families(worker: str, engine: SimulatedEngine) -> Iterator[Family]:
    """Yield the metrics of a simulated engine's contexts held for others, and of its requests that wait for KV."""
    contexts, at = engine.contexts, (worker,)
    for name, meaning, value in (
        ("kv_contexts_held", "Computed prompts held for decode workers", len(contexts)),
        ("kv_contexts_held_tokens", "Tokens of the prompts held for decode workers", contexts.tokens),
        ("kv_transfers_waiting", "Requests of a decode engine that wait for their KV", engine.fetching),
    ):
        yield gauge(name, meaning, ("worker",), [(at, value)])
    ended = by_name(at, {"handed_over": contexts.handed_over_total, "expired": contexts.expired_total})
    yield counter("kv_contexts", "Held prompts that were released: fetched, or expired", ("worker", "outcome"), ended)


def media_families(
    worker: str, loader: MediaLoader, encoders: EncodeClient | None, api: EncodeApi | None
) -> Iterator[Family]:
    """Yield the counts of requests' media, of questions to `encoders`, and of an encode worker's `api`."""
    at, by_outcome = (worker,), ("worker", "outcome")
    kinds, refused = by_name(at, loader.loaded_total), by_name(at, loader.refused_total)
    yield counter("media_loaded", "Media loaded for requests, by kind", ("worker", "kind"), kinds)
    meaning = "Bytes of media loaded for requests"
    yield counter("media_loaded_bytes", meaning, ("worker",), [(at, loader.loaded_bytes_total)])
    yield counter("media_refused", "Requests refused because of their media, by reason", ("worker", "reason"), refused)
    if encoders is not None:
        attempts = by_name(at, encoders.attempts_total)
        yield counter("encode_attempts", "Requests to encode workers, by outcome", by_outcome, attempts)
    if api is not None:
        requests, lookups = api.in_flight.requests_total, {"hit": api.cache.hits_total, "miss": api.cache.misses_total}
        yield counter("encode_requests", "Encoding requests, by outcome", by_outcome, by_name(at, requests))
        meaning = "Lookups in the cache of embeddings, by outcome"
        yield counter("embedding_lookups", meaning, by_outcome, by_name(at, lookups))
        running, size = [(at, api.in_flight.running)], [(at, api.cache.size_bytes)]
        yield gauge("encode_inflight_requests", "Prompts being encoded", ("worker",), running)
        yield gauge("embedding_cache_bytes", "Memory of cached embeddings", ("worker",), size)
