"""`worker-agent`: the commands, and the only place that knows all classes of the agent."""

import asyncio
import sys
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
import zmq
import zmq.asyncio

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_runtime.chat_template import TextError
from kv_runtime.clock import SystemClock
from kv_runtime.config import ConfigurationError, config_options, load_settings, render
from kv_runtime.event_log import BrokerUnavailable, EventLog, log_families
from kv_runtime.http import HttpServer, PortUsed
from kv_runtime.supervise import Part, run_parts, run_process, thread_part, until
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from kv_runtime.text import Text, load_text
from worker_agent.api import AgentApi
from worker_agent.attach import run_attached
from worker_agent.config import AgentSettings
from worker_agent.consolidator_metrics import ConsolidatorMetrics
from worker_agent.core.consolidation import Consolidation, Origin
from worker_agent.core.dialects.trtllm import TrtllmRules
from worker_agent.core.engine import EngineDescription
from worker_agent.core.mirror import ENGINE
from worker_agent.core.simulator.layout import CacheLayout
from worker_agent.core.simulator.scheduler import Simulator
from worker_agent.core.simulator.tokens import TokenSource
from worker_agent.engines.simulated import SimulatedEngine
from worker_agent.event_path import EventPath
from worker_agent.foreign import foreign_consolidator, new_epoch
from worker_agent.foreign_config import AttachSettings, ConsolidateSettings
from worker_agent.load_reports import LoadReports
from worker_agent.membership import Membership
from worker_agent.metrics import AgentMetrics
from worker_agent.print_engine_args import print_engine_args
from worker_agent.prompts import Prompts
from worker_agent.publisher import Source
from worker_agent.status import StatusApi, streams_status

_SWITCH_S = 0.0005
"""How long a thread may keep the interpreter: the event threads must not hold up the loop that streams answers."""
_HEAD_DRAIN_S = 10.0
_EXPECTED = (ConfigurationError, BrokerUnavailable, PortUsed, TextError)

SettingsT = TypeVar("SettingsT", AgentSettings, ConsolidateSettings, AttachSettings)


@click.group()
@click.version_option(package_name="kv-router")
def main() -> None:
    """Wrap an engine: serve its requests, publish what its KV cache holds."""


main.add_command(print_engine_args)


@main.command()
@config_options
@click.option("--engine", "engine_kind", help="which engine: simulated")
@click.option("--worker-id", help="unique name in the fleet")
@click.option("--model", help="the model's name in requests")
@click.option("--nats-url", help="the event log: nats://host:port")
@click.option("--port", type=int, help="HTTP port; 0: any free one")
def serve(
    file: Path | None,
    assignments: tuple[str, ...],
    print_config: bool,
    engine_kind: str | None,
    worker_id: str | None,
    model: str | None,
    nats_url: str | None,
    port: int | None,
) -> None:
    """Serve one engine until a signal comes."""
    flags = {
        "engine.kind": engine_kind,
        "engine.model": model,
        "worker.id": worker_id,
        "worker.port": port,
        "nats.url": nats_url,
    }
    _run(AgentSettings, file, assignments, flags, _serve, print_config=print_config)


@main.command()
@config_options
@click.option("--nats-url", help="the event log: nats://host:port")
@click.option("--port", type=int, help="HTTP port of /metrics and /health; 0: any free one")
def consolidate(
    file: Path | None,
    assignments: tuple[str, ...],
    print_config: bool,
    nats_url: str | None,
    port: int | None,
) -> None:
    """Head the streams of a host's workers, whose engines publish their KV events themselves."""
    flags = {"nats.url": nats_url, "control.port": port}
    _run(ConsolidateSettings, file, assignments, flags, _consolidate, print_config=print_config)


@main.command()
@config_options
@click.option("--engine", "engine__kind", help="which engine: vllm, sglang, trtllm-serve")
@click.option("--url", "engine__base_url", help="its OpenAI endpoint, http://host:port; absent: only streams")
@click.option("--kv-events", "engine__publish_endpoint", help="tcp://host:port of rank 0, or `poll`")
@click.option("--replay-endpoint", "engine__replay_endpoint", help="its replays, likewise; absent: it has none")
@click.option("--requests", "engine__requests", help="auto, direct (to the engine itself), forward (through here)")
@click.option("--dp-ranks", "engine__dp_ranks", type=int, help="its data-parallel ranks")
@click.option("--model", "engine__model", help="the model's name")
@click.option("--served-name", "engine__served_names", multiple=True, help="a name that requests may use, any number")
@click.option("--text", "engine__text", help="tokenizer and template: the model's directory")
@click.option("--block-size", "engine__block_size", type=int, help="tokens in a KV block")
@click.option("--total-kv-blocks", "engine__total_kv_blocks", type=int, help="KV blocks of a rank")
@click.option("--max-num-seqs", "engine__max_num_seqs", type=int, help="requests decoded together")
@click.option("--max-num-batched-tokens", "engine__max_num_batched_tokens", type=int, help="tokens in one iteration")
@click.option("--max-seq-len", "engine__max_seq_len", type=int, help="prompt and answer together, in tokens")
@click.option("--worker-id", "worker__id", help="unique name in the fleet")
@click.option("--nats-url", "nats__url", help="the event log: nats://host:port")
@click.option("--port", "control__port", type=int, help="HTTP port of /metrics and /health; 0: any free one")
@click.option("--forward-port", "worker__port", type=int, help="HTTP port of forwarded requests; 0: any free one")
def attach(file: Path | None, assignments: tuple[str, ...], print_config: bool, **flags: Any) -> None:  # noqa: ANN401
    """Bring one running engine into the fleet: its KV events, and, with --url, its load and its endpoint."""
    given = {name.replace("__", "."): value for name, value in flags.items() if value != ()}
    _run(AttachSettings, file, assignments, given, _attach, print_config=print_config)


def _run(
    kind: type[SettingsT],
    file: Path | None,
    assignments: tuple[str, ...],
    flags: dict[str, Any],
    process: Callable[[SettingsT, asyncio.Event], Coroutine[Any, Any, None]],
    *,
    print_config: bool,
) -> None:
    """Print the settings, or run the process with them; what is wrong with them or around it ends it with a line."""
    try:
        settings = load_settings(kind, file=file, assignments=assignments, flags=flags)
        if print_config:
            print(render(settings), end="")
            return
        configure_logs(settings.telemetry.log_level, settings.telemetry.log_format)
        run_process(lambda stop: process(settings, stop))
    except _EXPECTED as error:
        sys.exit(f"worker-agent: {error}")


async def _consolidate(settings: ConsolidateSettings, stop: asyncio.Event) -> None:
    if not settings.workers:
        raise ConfigurationError(["workers: found none, allowed at least one"])
    clock, control = SystemClock(), settings.control
    names = " ".join(worker.id for worker in settings.workers)
    log = await EventLog.connect(
        settings.nats.url, name=f"worker-agent {names}", token=settings.nats.credentials.get_secret_value()
    )
    context = zmq.asyncio.Context()
    try:
        consolidators = [
            foreign_consolidator(worker, settings.events, log, context, clock) for worker in settings.workers
        ]
        registry = new_registry()
        Projection(registry, ConsolidatorMetrics(consolidators).families)
        Projection(registry, lambda: log_families(log.statistics()))
        api = StatusApi(consolidators, version("kv-router"))
        http = HttpServer(api.app(registry, token=control.token.get_secret_value()), control.host, control.port)
        await http.start()
        for consolidator in consolidators:
            await consolidator.start()
        print(f"streams of {names}, status on http://{control.host}:{http.port}", flush=True)
        parts = [part for consolidator in consolidators for part in consolidator.parts(first_stage=1)]
        parts += [Part("http", http.run, 5), Part("event-log", log.run, 5)]
        await run_parts(parts, stop=stop, drain_s=_HEAD_DRAIN_S)
    finally:
        await log.close()
        context.destroy(linger=0)


async def _attach(settings: AttachSettings, stop: asyncio.Event) -> None:
    await run_attached(settings, stop, partial(print, flush=True))


async def _serve(settings: AgentSettings, stop: asyncio.Event) -> None:
    sys.setswitchinterval(_SWITCH_S)
    worker, clock = settings.worker, SystemClock()
    text = load_text(settings.engine.text)
    instance, log_found = uuid.uuid4().hex[:16], asyncio.Event()
    engine = _engine(settings, clock)
    log = await EventLog.connect(
        settings.nats.url,
        name=f"worker-agent {worker.id}",
        token=settings.nats.credentials.get_secret_value(),
        on_found=log_found.set,
    )
    context = zmq.asyncio.Context()
    rules = TrtllmRules(settings.engine.block_size, attention_window=settings.events.attention_window or None)
    path = _event_path(settings, engine, rules, log, context, clock, instance)
    loads = LoadReports(
        engine,
        log,
        clock,
        model=settings.engine.model,
        worker_id=worker.id,
        instance=instance,
        poll_s=settings.events.poll_s,
    )
    api = AgentApi(
        engine,
        text,
        Prompts(text),
        served_names=(settings.engine.model,),
        default_max_tokens=settings.engine.default_max_tokens,
        inflight_requests_max=worker.inflight_requests_max,
        wall_ns=clock.wall_ns,
        new_id=lambda: uuid.uuid4().hex,
        position=path.position,
        status=lambda: streams_status([path.consolidator]),
    )
    registry = new_registry()
    Projection(registry, AgentMetrics(worker.id, rules, path, loads, api).families)
    Projection(registry, lambda: log_families(log.statistics()))
    app = api.app(registry, token=worker.token.get_secret_value(), body_bytes_max=worker.body_bytes_max)
    http = HttpServer(app, worker.host, worker.port, drain_s=worker.drain_s, handler_cancellation=True)
    await http.start()
    registration = _registration(settings, engine.describe(), text, instance, http.port)
    membership = Membership(registration, log, clock, log_found)

    async def drive(stop: asyncio.Event) -> None:
        await until(stop, engine.run())

    await engine.start()
    await path.consolidator.start()
    print(f"worker {worker.id} on {registration.base_url}", flush=True)
    try:
        await run_parts(
            [
                Part("membership", membership.run, 0),
                Part("http", http.run, 1),
                Part("engine", drive, 2),
                thread_part("iteration-stats", loads.poll, stage=3),
                Part("load-reports", loads.run, 3),
                Part("loop-lag", LoopLag(registry, clock).run, 3),
                *path.parts(first_stage=3),
                Part("event-log", log.run, 7),
            ],
            stop=stop,
            drain_s=worker.drain_s + 5,
        )
    finally:
        await membership.leave("stopped")
        await log.close()
        context.destroy(linger=0)


def _event_path(
    settings: AgentSettings,
    engine: SimulatedEngine,
    rules: TrtllmRules,
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: SystemClock,
    instance: str,
) -> EventPath:
    sources = {
        ENGINE: Source(
            engine.kv_events,
            rules.translate,
            buffer_events=settings.engine.event_buffer_max_size * settings.engine.dp_ranks,
            stale=rules.stale,
            events_lost=rules.events_lost,
        )
    }
    if settings.engine.host_events == "source":
        sources["host"] = Source(engine.host_events)
    core = Consolidation(
        engine.describe().dp_ranks,
        settings.engine.block_size,
        instance,
        new_epoch,
        origins=[Origin(name) for name in sources],
        outbox_bytes_max=settings.events.outbox_bytes_max,
        ring_bytes_max=settings.events.batch_ring_bytes_max,
    )
    return EventPath(
        sources,
        core,
        log,
        context,
        clock,
        model=settings.engine.model,
        worker_id=settings.worker.id,
        ring_bytes_max=settings.events.ring_bytes_max,
        poll_s=settings.events.poll_s,
    )


def _engine(settings: AgentSettings, clock: SystemClock) -> SimulatedEngine:
    engine = settings.engine
    description = EngineDescription(
        model=engine.model,
        version=version("kv-router"),
        event_source="simulated",
        block_size=engine.block_size,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_seq_len,
        dp_ranks=tuple(range(engine.dp_ranks)),
    )
    simulator = Simulator(
        description,
        token_source=TokenSource(seed=engine.seed),
        layout=CacheLayout(
            host_blocks=engine.host_blocks,
            host_events=engine.host_events,
            narrow_windows=engine.narrow_windows,
            narrow_blocks=engine.window_blocks,
        ),
        event_buffer_max_size=engine.event_buffer_max_size,
    )
    return SimulatedEngine(simulator, clock, speed=engine.speed)


def _registration(
    settings: AgentSettings, engine: EngineDescription, text: Text, instance: str, port: int
) -> WorkerRegistered:
    return WorkerRegistered(
        worker_id=settings.worker.id,
        instance=instance,
        model=engine.model,
        served_names=(engine.model,),
        role=settings.worker.role,
        base_url=f"http://{settings.advertised_host}:{port}",
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
        event_source=engine.event_source,
        accepts_token_ids=True,
        version=engine.version,
    )


if __name__ == "__main__":
    main()
