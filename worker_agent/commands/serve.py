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
from typing import NamedTuple

import zmq.asyncio
from prometheus_client import CollectorRegistry

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, connected_log, log_families
from kv_runtime.http.hosts import url_of
from kv_runtime.http.server import HttpServer
from kv_runtime.main_thread import ThreadCall
from kv_runtime.supervise import Part, PartGaveUp, run_parts, until
from kv_runtime.telemetry import Family, LoopLag, Projection, by_name, counter, gauge, new_registry
from kv_runtime.text.model import Text
from kv_runtime.tracing.service import Tracing, events_of, opened_tracing, span_families
from worker_agent.api.app import AgentApi, streams_status
from worker_agent.api.completions import Completions
from worker_agent.api.in_flight import SERVICE, worker_tracer
from worker_agent.attached.watch import labelled
from worker_agent.commands.engine_choice import EngineChoice, build_engine, engine_text
from worker_agent.commands.served_media import ServedMedia
from worker_agent.config import AgentSettings
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.events.consolidator import Consolidator, WorkerStreams, end_unrun, event_path
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.source_poller import Source
from worker_agent.fleet.canary import CanaryWatch
from worker_agent.fleet.membership import Membership
from worker_agent.fleet.worker_id import WorkerId
from worker_agent.load.reports import LoadReports
from worker_agent.metrics import agent_families
from worker_agent.port.types import Engine, EngineStopped

_SWITCH_S = 0.0005
"""Interpreter switch interval: threads that translate events must not hold up the event loop, which streams answers."""
_ABORTS_S = 2.0
"""Time for a decode worker's aborted requests to fetch the blocks that a prefill worker holds for them."""


class _WorkerParts(NamedTuple):
    """The shared parts of the process, once the engine is loaded."""

    settings: AgentSettings
    chosen: EngineChoice
    engine: SimulatedEngine | TensorRTLLMEngine
    text: Text
    media: ServedMedia
    instance: str
    clock: Clock
    log: EventLog
    rules: TrtllmRules
    events: Consolidator
    worker_id: WorkerId
    tracing: Tracing | None


async def run_served(
    settings: AgentSettings,
    chosen: EngineChoice,
    stop: asyncio.Event,
    report: Callable[[str], None],
    call: ThreadCall = asyncio.to_thread,
) -> None:
    """Serve until `stop` is set or the engine dies; `report` receives the address once the engine is loaded.

    `call` runs the functions that build and shut down a TensorRT-LLM engine.

    Raises:
        EngineError: the engine cannot be loaded.
        WorkerIdTaken: another living worker has the id, found before the engine is loaded, or later, after draining.
        ConfigurationError: what is said of tracing is not allowed, or a package is missing.
        PartGaveUp: the engine died; everything else has drained.
        TextError, BrokerUnavailable, PortUsed: another requirement of a worker is missing.
    """
    settings = settings.model_copy(update={"worker": settings.worker.identified()})
    sys.setswitchinterval(_SWITCH_S)
    clock, text = Clock(), engine_text(settings, chosen)
    model_path = chosen.text if chosen.takes_media else ""
    media = ServedMedia(settings, text, clock, model=chosen.names[0], model_path=model_path)
    engine = build_engine(settings, chosen, text, clock, call)
    instance = uuid.uuid4().hex[:16]
    tracing = opened_tracing(settings.tracing, os.environ, f"{settings.worker.id}/{instance}", service=SERVICE)
    async with AsyncExitStack() as cleanup:
        name = f"worker-agent {settings.worker.id}"
        log = await cleanup.enter_async_context(connected_log(settings.nats, name, awaited_until=stop))
        gate = FleetGate(settings.nats.fleet_secrets)
        worker_id = WorkerId(log, clock, gate, worker_id=settings.worker.id, instance=instance)
        await until(stop, worker_id.check())
        context = zmq.asyncio.Context()
        cleanup.callback(context.destroy, linger=0)
        async with AsyncExitStack() as until_run:
            until_run.push_async_callback(engine.stop, 0.0)
            await until(stop, engine.start())
            if stop.is_set():
                return
            described = engine.describe()
            rules, buffered = TrtllmRules(described.block_size), chosen.event_buffer * len(described.dp_ranks)
            source = Source(lambda work, timeout_s: work.call(partial(engine.kv_events, timeout_s)), rules, buffered)
            events = event_path(
                WorkerStreams(settings.worker.id, chosen.names[0], instance, described.block_size, described.dp_ranks),
                source if chosen.polls_events else None,
                settings.events.sources,
                log,
                context,
                clock,
                ring_bytes_max=settings.events.batch_ring_bytes_max,
                tracing=events_of(tracing),
            )
            until_run.push_async_callback(end_unrun, events.parts(first_stage=0))
            worker = _WorkerParts(
                settings, chosen, engine, text, media, instance, clock, log, rules, events, worker_id, tracing
            )
            parts = await _parts(worker, cleanup, report)
            until_run.pop_all()  # from here on the parts end engine and events
        await run_parts(parts, stop=stop, drain_s=settings.drain_s + _ABORTS_S)


async def _parts(worker: _WorkerParts, cleanup: AsyncExitStack, report: Callable[[str], None]) -> list[Part]:
    """Return the parts to run; requests are accepted from now on, and `cleanup` publishes `WorkerLeft`."""
    registry, events, wait_s = new_registry(), worker.events, worker.settings.worker.canary_wait_s
    watch: CanaryWatch | None = None
    if wait_s:
        is_decode = worker.settings.worker.role == "decode"
        begin_id = worker.text.bos_id
        watch = CanaryWatch(worker.engine, worker.clock, wait_s=wait_s, begin_id=begin_id, is_decode=is_decode)
    api = _api(worker, watch)
    http = _http(worker, api, registry)
    await http.start()
    registration = _registration(worker, api, http.port)
    membership = Membership(registration, worker.worker_id, worker.clock)
    worker_id = worker.settings.worker.id
    loads = LoadReports(
        worker.engine,
        worker.log,
        worker.clock,
        model=registration.model,
        worker_id=worker_id,
        instance=worker.instance,
        dp_ranks=registration.dp_ranks,
        in_flight=lambda: api.in_flight.running,
    )
    Projection(registry, partial(agent_families, worker_id, worker.rules, events, loads, api))
    Projection(registry, partial(served_families, worker_id, worker.engine, watch))
    Projection(registry, lambda: worker.media.families(worker_id))
    Projection(registry, lambda: log_families(worker.log.statistics()))
    Projection(registry, membership.families)
    Projection(registry, lambda: span_families(None if worker.tracing is None else worker.tracing.exporter))
    await events.start()
    cleanup.push_async_callback(membership.leave, "stopped")
    report(f"worker {worker_id} on {registration.base_url}")
    return [
        Part("membership", membership.run, 0),
        *([] if watch is None else [Part("canary", partial(watch.run, membership), 0)]),
        Part("http", http.run, 1, lambda: {"requests": api.in_flight.running}),
        *worker.media.parts(2, worker.log, FleetGate(worker.settings.nats.fleet_secrets)),
        *([loads.work.part(stage=2)] if worker.chosen.has_statistics else []),
        Part("loop-lag", LoopLag(registry, worker.clock).run, 2),
        *events.parts(first_stage=2),
        *_engine_parts(worker.engine, membership, stage=3),
        *([] if worker.tracing is None else [worker.tracing.exporter.part(2)]),
        Part("event-log", worker.log.run, 8),
    ]


def _engine_parts(engine: Engine, membership: Membership, stage: int) -> list[Part]:
    """Return the two parts of the engine: one drives it until the other has stopped it.

    The transfers that it began may end. If it dies, the worker is withdrawn, and its part raises `PartGaveUp`.
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


def _api(worker: _WorkerParts, watch: CanaryWatch | None) -> AgentApi:
    settings, engine = worker.settings, worker.engine
    completions = Completions(
        engine,
        worker.text,
        worker.media.prompts,
        served_names=worker.chosen.names,
        default_max_tokens=settings.engine.default_max_tokens,
        clock=worker.clock,
        role=settings.worker.role,
        loras=tuple(settings.trtllm.loras),
        body_limits=settings.worker.body_limits(),
        answer_format=settings.engine.answer_format,
        on_output=watch.on_output if watch is not None else lambda: None,
    )
    return AgentApi(
        completions,
        inflight_requests_max=settings.worker.inflight_requests_max,
        position=worker.events.position,
        status=lambda: {**streams_status([worker.events]), "sources": worker.events.status()},
        fault=lambda: engine.fault if isinstance(engine, TensorRTLLMEngine) else None,
        tracer=worker_tracer(worker.tracing, settings.worker.id, settings.worker.role, worker.chosen.names[0]),
    )


def _http(worker: _WorkerParts, api: AgentApi, registry: CollectorRegistry) -> HttpServer:
    """Return the server of all endpoints of the worker, with those of an encode worker."""
    section = worker.settings.worker
    app = api.app(registry, token=section.token.get_secret_value(), body_bytes_max=section.body_bytes_max)
    if section.role == "encode":
        app.add_routes(worker.media.encode_api(worker.engine, worker.chosen.names).routes())
    return HttpServer(
        app,
        section.host,
        section.port,
        hosts=section.host_names(),
        drain_s=section.drain_s,
        handler_cancellation=True,
    )


def _registration(worker: _WorkerParts, api: AgentApi, port: int) -> WorkerRegistered:
    settings, engine, text = worker.settings, worker.engine.describe(), worker.text
    return WorkerRegistered(
        worker_id=settings.worker.id,
        instance=worker.instance,
        model=engine.model,
        served_names=worker.chosen.names,
        role=settings.worker.role,
        base_url=url_of(settings.worker.advertised_host, port),
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
        loras=tuple(settings.trtllm.loras),
        taints=settings.worker.taints,
        transfer_domain=settings.worker.transfer_domain,
        event_source=engine.event_source if worker.chosen.polls_events else "none",
        accepts_token_ids=True,
        version=engine.version,
        endpoint=settings.worker.endpoint_name,
        api_endpoints=api.api_endpoints,
        images=worker.media.rule,
        kv_cache_dtype=engine.kv_cache_dtype,
        block_reuse=worker.chosen.block_reuse,
        transfer_buffer_tokens=worker.chosen.transfer_buffer_tokens,
        transfer_backend=worker.chosen.transfer_backend,
    )


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
    fetches = engine.fetches  # TensorRT-LLM counts those that failed, and of the others those that it measured
    yield counter("kv_transfers", "Fetches of KV, by outcome", ("worker", "outcome"), by_name(at, fetches.by_outcome))
    yield counter("kv_transfer_bytes", "Bytes of KV fetched", ("worker",), [(at, fetches.fetched_bytes)])
    meaning = "Duration of complete fetches, summed; of a simulated engine in simulated time"
    yield counter("kv_transfer_seconds", meaning, ("worker",), [(at, fetches.seconds)])
    outcomes = [] if canary is None else by_name(at, canary.requests_total)
    meaning = "Canary requests to the idle engine, by outcome"
    yield counter("engine_canaries", meaning, ("worker", "outcome"), outcomes)


def _context_families(worker: str, engine: SimulatedEngine) -> Iterator[Family]:
    """Yield a simulated engine's contexts held for others, and its requests that wait for theirs."""
    contexts, at = engine.contexts, (worker,)
    for name, meaning, value in (
        ("kv_contexts_held", "Computed prompts held for decode workers", len(contexts)),
        ("kv_contexts_held_tokens", "Tokens of the prompts held for decode workers", contexts.tokens),
        ("kv_transfers_waiting", "Requests of a decode engine that wait for their KV", engine.fetching),
    ):
        yield gauge(name, meaning, ("worker",), [(at, value)])
    ended = by_name(at, {"handed_over": contexts.handed_over_total, "expired": contexts.expired_total})
    yield counter("kv_contexts", "Held prompts that were released: fetched, or expired", ("worker", "outcome"), ended)
