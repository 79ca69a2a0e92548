"""`router`: the commands, and the only place that knows all classes of the router."""

import asyncio
import os
import sys
import uuid
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import click
from prometheus_client import CollectorRegistry

from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_protocol.journal import LedgerApplied
from kv_runtime.chat_template import TextError
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.config import ConfigurationError, config_options, load_settings, render
from kv_runtime.event_log import BrokerUnavailable, EventLog, StreamUnfit
from kv_runtime.http import HttpServer, PortUsed
from kv_runtime.nats_server import EmbeddedNats, NatsServerError
from kv_runtime.supervise import Part, run_parts, run_process
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from kv_runtime.text import Text, load_text
from router.admission import Admission, FleetRoom
from router.commands.journal import journal
from router.commands.replay import replay
from router.config import RouterSettings
from router.control_plane import ControlPlane
from router.core.fleet import TextDigests
from router.core.recording import Recorder, Recorders
from router.core.state_settings import StateSettings
from router.core.tenants import SECRET_BYTES, TenantNames
from router.endpoints import Endpoints
from router.feeds import RouterFeeds
from router.http.plane import HttpPlane
from router.journal import JournalWriter, ensure_journal, journal_families, router_name
from router.metrics import (
    RequestMetrics,
    http_families,
    policy_families,
    prompt_families,
    queue_families,
    state_families,
    trust_families,
)
from router.names import Names
from router.policy_loader import load_modes
from router.replicas import Replicas, replica_families
from router.routing import Routing
from router.serving import Serving
from router.tokens import Prompts
from router.trust_watch import TrustWatch

_OTHER_STREAMS_BYTES = 256 << 20
"""Room in the embedded server's store for all streams but those of events, snapshots and the journal."""
_EXPECTED = (ConfigurationError, BrokerUnavailable, StreamUnfit, NatsServerError, PortUsed, TextError)


@click.group(invoke_without_command=True)
@click.version_option(package_name="kv-router")
@config_options
@click.option("--mode", help="how a worker is chosen: kv, round-robin, ...; see policy.mode")
@click.option("--port", type=int, help="data plane port; 0: any free one")
@click.option("--control-port", type=int, help="control plane port; 0: any free one")
@click.option("--nats-url", help="the event log; without it a nats-server is embedded")
@click.option("--text", help="tokenizer and template: `byte`, or a local model directory")
@click.pass_context
def main(
    context: click.Context,
    file: Path | None,
    assignments: tuple[str, ...],
    print_config: bool,
    mode: str | None,
    port: int | None,
    control_port: int | None,
    nats_url: str | None,
    text: str | None,
) -> None:
    """Route each request to the worker that holds most of its prefix. Without a command: serve."""
    if context.invoked_subcommand is not None:
        return
    flags = {
        "policy.mode": mode,
        "data.port": port,
        "control.port": control_port,
        "nats.url": nats_url,
        "tokens.text": text,
    }
    try:
        settings = load_settings(RouterSettings, file=file, assignments=assignments, flags=flags)
        if print_config:
            print(render(settings), end="")
            return
        configure_logs(settings.telemetry.log_level, settings.telemetry.log_format)
        run_process(lambda stop: _serve(settings, stop))
    except _EXPECTED as error:
        sys.exit(f"router: {error}")


@main.command()
@click.option("--keep", is_flag=True, help="leave the fleet up afterwards, and print its addresses")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option("--seed", default=1, show_default=True, type=int, help="of the workload and of every draw")
def demo(keep: bool, workers: int, seed: int) -> None:
    """Show it: one workload through a real fleet twice, round-robin and kv."""
    from rich.console import Console

    from bench.demo import Demo
    from bench.workload import WorkloadShape

    show = Demo(Console(), workers=workers, shape=WorkloadShape(), seed=seed)
    run_process(lambda stop: show.run(stop, keep=keep))


class _Benches(click.Group):
    """The commands of `bench`, which is imported when one is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        from bench.commands import COMMANDS

        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        from bench.commands import COMMANDS

        return COMMANDS.get(cmd_name)


@main.group(cls=_Benches)
def bench() -> None:
    """Measure it: every bench states the machine, and prints what it lost too."""


@main.command()
@click.option("--write", "directory", required=True, type=click.Path(file_okay=False, path_type=Path))
def dashboards(directory: Path) -> None:
    """Write the Grafana dashboards and their provisioning into a directory."""
    from dashboards.files import write

    for path in write(directory):
        print(path)


main.add_command(journal)
main.add_command(replay)


async def _serve(settings: RouterSettings, stop: asyncio.Event) -> None:
    clock, registry, instance = SystemClock(), new_registry(), uuid.uuid4().hex
    text = load_text(settings.tokens.text, settings.tokens.encoder)
    modes = load_modes(settings.policy.user_modes, settings.policy.mode)
    async with AsyncExitStack() as cleanup:
        embedded = await _embedded_nats(settings, cleanup)
        log = await EventLog.connect(
            embedded.url if embedded else settings.nats.url,
            name="router",
            token=settings.nats.credentials.get_secret_value(),
        )
        cleanup.push_async_callback(log.close)
        await ensure_streams(log, settings.nats)
        index = EmbeddedIndex(settings.index, log, clock, settings.nats)
        folds = _folds(settings, text)
        writer = await _journal(settings, folds, index, log, clock, instance)
        replicas = Replicas(
            log,
            clock,
            router_id=router_name(settings.journal, instance),
            model_of=lambda worker_id: _model_of(routing, worker_id),
            apply=lambda event, router: routing.apply(LedgerApplied(now_s=clock.now(), event=event, router=router)),
        )
        recorders: list[Recorder] = [each for each in (writer, replicas if settings.ledger.replicas else None) if each]
        routing = Routing(
            folds.state(modes),
            index,
            clock,
            settings.policy.policy(),
            seed=settings.policy.seed,
            lease_s=settings.ledger.lease_s,
            decisions_max=settings.journal.decisions_max,
            recorder=Recorders(*recorders),
        )
        feeds = RouterFeeds(routing, log, clock)
        admission = Admission(clock, FleetRoom(routing, settings.queue.threshold), settings.queue.limits())
        metrics = RequestMetrics(registry, routing.state, tuple(modes))
        prompts = Prompts(text, settings.tokens.limits(), hashed=partial(metrics.stage, "hash"))
        serving = Serving(
            routing,
            prompts,
            admission,
            metrics,
            TenantNames(settings.queue.fair_share_by, settings.queue.fair_share_header, os.urandom(SECRET_BYTES)),
            settings,
            Names(instance).new,
        )
        data = HttpPlane(Endpoints(serving, index_name=index.implementation), settings.data.limits())
        control_app = ControlPlane(routing, index, log).app(registry, token=settings.control.token.get_secret_value())
        control = HttpServer(control_app, settings.control.host, settings.control.port)
        _project(registry, routing, feeds, admission, index, writer)
        Projection(registry, lambda: http_families(data.statistics()))
        Projection(registry, lambda: prompt_families(prompts.statistics()))
        Projection(registry, lambda: replica_families(replicas))
        await control.start()
        await index.start()
        await feeds.start()
        if settings.ledger.replicas:
            await replicas.start()
        await feeds.acquainted(stop)
        await data.start(settings.data.host, settings.data.port, reuse_port=settings.data.reuse_port)
        _greet(settings, data, control, embedded)
        await run_parts(
            [
                Part("data-plane", data.run, 0),
                Part("control-plane", control.run, 1),
                Part("admission", admission.run, 1),
                *prompts.parts(1),
                Part("feeds", feeds.run, 2),
                Part("trust-watch", TrustWatch(routing, clock).run, 2),
                Part("loop-lag", LoopLag(registry, clock).run, 2),
                *([Part("replicas", replicas.run, 2)] if settings.ledger.replicas else []),
                *([Part("journal", writer.run, 2)] if writer else []),
                *index.parts(3),
                *([Part("nats-server", embedded.run, 4)] if embedded else []),
            ],
            stop=stop,
            drain_s=settings.data.drain_s + 5,
        )


def _model_of(routing: Routing, worker_id: str) -> str | None:
    worker = routing.state.fleet.worker(worker_id)
    return None if worker is None else worker.registration.model


def _folds(settings: RouterSettings, text: Text) -> StateSettings:
    return StateSettings(
        text=TextDigests(text.tokenizer_digest, text.template_digest),
        lease_s=settings.ledger.lease_s,
        approximate=settings.policy.approximate(),
        affinity=settings.policy.affinity_limits(),
        breakers=settings.failures.breakers(),
    )


async def _journal(
    settings: RouterSettings, folds: StateSettings, index: EmbeddedIndex, log: EventLog, clock: Clock, instance: str
) -> JournalWriter | None:
    if not settings.journal.enabled:
        return None
    await ensure_journal(log, settings.journal, settings.nats)
    name = router_name(settings.journal, instance)
    return JournalWriter(log, clock, settings.journal, router=name, state=folds, kv_seq=index.log_seq)


def _project(
    registry: CollectorRegistry,
    routing: Routing,
    feeds: RouterFeeds,
    admission: Admission,
    index: EmbeddedIndex,
    writer: JournalWriter | None,
) -> None:
    Projection(registry, lambda: state_families(routing.state, feeds))
    Projection(registry, lambda: trust_families(routing))
    Projection(registry, lambda: policy_families(routing))
    Projection(registry, lambda: queue_families(admission.statistics()))
    Projection(registry, index.families)
    if writer is not None:
        Projection(registry, lambda: journal_families(writer.statistics()))


async def _embedded_nats(settings: RouterSettings, cleanup: AsyncExitStack) -> EmbeddedNats | None:
    nats = settings.nats
    if nats.url:
        return None
    store_dir = Path(nats.store_dir) if nats.store_dir else None
    return await cleanup.enter_async_context(
        EmbeddedNats(
            port=nats.port,
            store_dir=store_dir,
            store_bytes_max=2 * nats.events_max_bytes
            + nats.snapshots_bytes_max
            + settings.journal.max_bytes
            + _OTHER_STREAMS_BYTES,
        )
    )


def _greet(settings: RouterSettings, data: HttpPlane, control: HttpServer, embedded: EmbeddedNats | None) -> None:
    print(f"router on      http://{settings.data.host}:{data.port}  (mode {settings.policy.mode})")
    print(f"control plane  http://{settings.control.host}:{control.port}")
    print(f"event log      {embedded.url if embedded else settings.nats.url}", flush=True)


if __name__ == "__main__":
    main()
