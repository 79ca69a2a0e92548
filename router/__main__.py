"""`router`: the commands, and the only place that knows all classes of the router."""

import asyncio
import sys
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import click

from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_runtime.chat_template import TextError
from kv_runtime.clock import SystemClock
from kv_runtime.config import ConfigurationError, NatsSection, config_options, load_settings, render
from kv_runtime.event_log import BrokerUnavailable, EventLog, StreamUnfit
from kv_runtime.http import HttpServer, PortUsed
from kv_runtime.nats_server import EmbeddedNats, NatsServerError
from kv_runtime.supervise import Part, run_parts, run_process
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from kv_runtime.text import load_text
from router.config import RouterSettings
from router.control_plane import ControlPlane
from router.core.approximate import ApproximateIndex
from router.core.fleet import Fleet, TextDigests
from router.core.ledger import Ledger
from router.core.state import RouterState
from router.data_plane import DataPlane
from router.feeds import RouterFeeds
from router.forward import HttpForwarder
from router.metrics import RequestMetrics, state_families, trust_families
from router.routing import Routing
from router.trust_watch import TrustWatch

_OTHER_STREAMS_BYTES = 256 << 20
"""Room in the embedded server's store for all streams but those of events and snapshots."""
_EXPECTED = (ConfigurationError, BrokerUnavailable, StreamUnfit, NatsServerError, PortUsed, TextError)


@click.group(invoke_without_command=True)
@click.version_option(package_name="kv-router")
@config_options
@click.option("--mode", help="how a worker is chosen: kv or round-robin")
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


async def _serve(settings: RouterSettings, stop: asyncio.Event) -> None:
    clock, registry = SystemClock(), new_registry()
    text = load_text(settings.tokens.text)
    async with AsyncExitStack() as cleanup:
        embedded = await _embedded_nats(settings.nats, cleanup)
        log = await EventLog.connect(
            embedded.url if embedded else settings.nats.url,
            name="router",
            token=settings.nats.credentials.get_secret_value(),
        )
        cleanup.push_async_callback(log.close)
        await ensure_streams(log, settings.nats)
        index = EmbeddedIndex(settings.index, log, clock, settings.nats)
        fleet = Fleet(TextDigests(text.tokenizer_digest, text.template_digest))
        approximate = ApproximateIndex(settings.policy.approximate())
        state = RouterState(fleet, Ledger(settings.ledger.lease_s), approximate)
        routing = Routing(
            state,
            index,
            clock,
            settings.policy.policy(),
            seed=settings.policy.seed,
            lease_s=settings.ledger.lease_s,
            decisions_max=settings.journal.decisions_max,
        )
        feeds = RouterFeeds(state, log, clock)
        forwarder = HttpForwarder(settings.failures, settings.data.worker_token.get_secret_value())
        await forwarder.start()
        cleanup.push_async_callback(forwarder.stop)
        metrics = RequestMetrics(registry, state)
        Projection(registry, lambda: state_families(state, feeds))
        Projection(registry, lambda: trust_families(routing))
        Projection(registry, index.families)
        plane = DataPlane(
            routing,
            forwarder,
            text,
            metrics,
            settings,
            lambda: uuid.uuid4().hex,
            index_name=index.implementation,
        )
        data = _data_server(plane, settings)
        token = settings.control.token.get_secret_value()
        control_app = ControlPlane(routing, index, log).app(registry, token=token)
        control = HttpServer(control_app, settings.control.host, settings.control.port)
        await control.start()
        await index.start()
        await feeds.start()
        await feeds.acquainted(stop)
        await data.start(reuse_port=settings.data.reuse_port)
        _greet(settings, data, control, embedded)
        await run_parts(
            [
                Part("data-plane", data.run, 0),
                Part("control-plane", control.run, 1),
                Part("feeds", feeds.run, 2),
                Part("trust-watch", TrustWatch(routing, clock).run, 2),
                Part("loop-lag", LoopLag(registry, clock).run, 2),
                *index.parts(2),
                *([Part("nats-server", embedded.run, 3)] if embedded else []),
            ],
            stop=stop,
            drain_s=settings.data.drain_s + 5,
        )


def _data_server(plane: DataPlane, settings: RouterSettings) -> HttpServer:
    return HttpServer(
        plane.app(),
        settings.data.host,
        settings.data.port,
        drain_s=settings.data.drain_s,
        handler_cancellation=True,
    )


async def _embedded_nats(nats: NatsSection, cleanup: AsyncExitStack) -> EmbeddedNats | None:
    if nats.url:
        return None
    store_dir = Path(nats.store_dir) if nats.store_dir else None
    return await cleanup.enter_async_context(
        EmbeddedNats(
            port=nats.port,
            store_dir=store_dir,
            store_bytes_max=2 * nats.events_max_bytes + nats.snapshots_bytes_max + _OTHER_STREAMS_BYTES,
        )
    )


def _greet(settings: RouterSettings, data: HttpServer, control: HttpServer, embedded: EmbeddedNats | None) -> None:
    print(f"router on      http://{settings.data.host}:{data.port}  (mode {settings.policy.mode})")
    print(f"control plane  http://{settings.control.host}:{control.port}")
    print(f"event log      {embedded.url if embedded else settings.nats.url}", flush=True)


if __name__ == "__main__":
    main()
