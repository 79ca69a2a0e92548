"""`worker-agent`: the commands, and the only place that knows all classes of the agent."""

import asyncio
import secrets
import sys
import uuid
from importlib.metadata import version
from pathlib import Path

import click
import zmq
import zmq.asyncio

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_runtime.chat_template import TextError
from kv_runtime.clock import SystemClock
from kv_runtime.config import ConfigurationError, config_options, load_settings, render
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.http import HttpServer, PortUsed
from kv_runtime.supervise import Part, run_parts, run_process, thread_part, until
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from kv_runtime.text import Text, load_text
from worker_agent.api import AgentApi
from worker_agent.config import AgentSettings
from worker_agent.consolidator import Consolidator
from worker_agent.core.consolidation import Consolidation
from worker_agent.core.dialects.trtllm import TrtllmRules
from worker_agent.core.engine import EngineDescription
from worker_agent.core.simulator.scheduler import Simulator
from worker_agent.core.simulator.tokens import TokenSource
from worker_agent.core.source_cursor import SourceCursor
from worker_agent.engines.port import Engine
from worker_agent.engines.simulated import SimulatedEngine
from worker_agent.load_reports import LoadReports
from worker_agent.membership import Membership
from worker_agent.metrics import AgentMetrics
from worker_agent.publisher import EventPublisher, ReplayServer

_SWITCH_S = 0.0005
"""How long a thread may keep the interpreter: the event threads must not hold up the loop that streams answers."""
_EXPECTED = (ConfigurationError, BrokerUnavailable, PortUsed, TextError)


@click.group()
@click.version_option(package_name="kv-router")
def main() -> None:
    """Wrap an engine: serve its requests, publish what its KV cache holds."""


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
    try:
        settings = load_settings(AgentSettings, file=file, assignments=assignments, flags=flags)
        if print_config:
            print(render(settings), end="")
            return
        configure_logs(settings.telemetry.log_level, settings.telemetry.log_format)
        sys.setswitchinterval(_SWITCH_S)
        run_process(lambda stop: _serve(settings, stop))
    except _EXPECTED as error:
        sys.exit(f"worker-agent: {error}")


async def _serve(settings: AgentSettings, stop: asyncio.Event) -> None:
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
    publisher, replay, consolidator, loads = _event_path(settings, engine, log, context, clock, instance)

    async def position() -> dict[int, tuple[int, int]]:
        return await consolidator.position(await publisher.barrier())

    api = AgentApi(
        engine,
        text,
        served_names=(settings.engine.model,),
        default_max_tokens=settings.engine.default_max_tokens,
        inflight_requests_max=worker.inflight_requests_max,
        wall_ns=clock.wall_ns,
        new_id=lambda: uuid.uuid4().hex,
        position=position,
    )
    registry = new_registry()
    Projection(registry, AgentMetrics(worker.id, publisher, consolidator, loads, api).families)
    app = api.app(registry, token=worker.token.get_secret_value(), body_bytes_max=worker.body_bytes_max)
    http = HttpServer(app, worker.host, worker.port, drain_s=worker.drain_s, handler_cancellation=True)
    await http.start()
    registration = _registration(settings, engine.describe(), text, instance, http.port)
    membership = Membership(registration, log, clock, log_found)

    async def drive(stop: asyncio.Event) -> None:
        await until(stop, engine.run())

    await engine.start()
    await consolidator.start()
    print(f"worker {worker.id} on {registration.base_url}", flush=True)
    try:
        await run_parts(
            [
                Part("membership", membership.run, 0),
                Part("http", http.run, 1),
                Part("engine", drive, 2),
                thread_part("kv-events", publisher.run, stage=3),
                thread_part("iteration-stats", loads.poll, stage=3),
                Part("load-reports", loads.run, 3),
                Part("loop-lag", LoopLag(registry, clock).run, 3),
                *consolidator.parts(first_stage=4),
                Part("replay", replay.run, 7),
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
    engine: Engine,
    log: EventLog,
    context: zmq.asyncio.Context,
    clock: SystemClock,
    instance: str,
) -> tuple[EventPublisher, ReplayServer, Consolidator, LoadReports]:
    model, worker_id = settings.engine.model, settings.worker.id
    publisher = EventPublisher(
        engine,
        TrtllmRules(settings.engine.block_size),
        zmq.Context(context),
        ring_bytes_max=settings.events.ring_bytes_max,
        poll_s=settings.events.poll_s,
        wall_ns=clock.wall_ns,
    )
    replay = ReplayServer(publisher.ring, context)
    consolidator = Consolidator(
        Consolidation(
            engine.describe().dp_ranks,
            settings.engine.block_size,
            instance,
            lambda: secrets.randbits(64),
            outbox_bytes_max=settings.events.outbox_bytes_max,
        ),
        SourceCursor(),
        log,
        context,
        clock,
        model=model,
        worker_id=worker_id,
        publish_endpoint=publisher.endpoint,
        replay_endpoint=replay.endpoint,
        source_stale=publisher.stale,
    )
    loads = LoadReports(
        engine, log, clock, model=model, worker_id=worker_id, instance=instance, poll_s=settings.events.poll_s
    )
    return publisher, replay, consolidator, loads


def _engine(settings: AgentSettings, clock: SystemClock) -> Engine:
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
