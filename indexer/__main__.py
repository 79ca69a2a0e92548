"""`indexer`: the commands, and the only place that knows all classes of the stand-alone index."""

import asyncio
import os
import uuid

import click

import indexer.required  # noqa: F401  before numpy is imported
from indexer.commands.at import at
from indexer.commands.dump import dump
from indexer.commands.http import index_app
from indexer.commands.tail import tail
from indexer.commands.verify import verify
from indexer.config import IndexerSettings
from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_runtime.clock import Clock
from kv_runtime.config.command import takes_settings
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import BrokerUnavailable, StreamUnfit, connected_log
from kv_runtime.extras import LazyCommand
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.http.hosts import url_of
from kv_runtime.http.server import HttpServer
from kv_runtime.nats_server import NatsServerError
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, run_parts
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.tracing.service import events_of, opened_tracing, span_families

SERVICE = "kv-router-index"
"""`service.name`, unless the environment sets another."""
_EXPECTED = (ConfigurationError, BrokerUnavailable, StreamUnfit, NatsServerError, PortUsed)


@click.group()
@click.version_option(package_name="kv-router")
def main() -> None:
    """Follow the event log; say which worker rank holds which prefix."""


@main.command()
@takes_settings(IndexerSettings, "indexer", _EXPECTED)
@click.option("--nats-url", "nats__url", help="the event log: nats://host:port")
@click.option("--port", "control__port", type=int, help="HTTP port; 0: any free one")
def serve(*, settings: IndexerSettings, **_: object) -> None:
    """Serve the index over HTTP until a signal comes."""
    run_process(lambda stop: _serve(settings, stop))


check_capture = LazyCommand(
    "check-capture",
    "bench.capture.command:check_capture",
    "Compare what a recording of a real engine's KV events predicts with what the engine reused.",
    program="indexer",
    extra="tools",
)
for command in (verify, tail, at, dump, check_capture):
    main.add_command(command)


async def _serve(settings: IndexerSettings, stop: asyncio.Event) -> None:
    async with connected_log(settings.nats, "indexer") as log:
        await ensure_streams(log, settings.nats)
        tracing = opened_tracing(settings.tracing, os.environ, uuid.uuid4().hex, service=SERVICE, has_requests=False)
        index = EmbeddedIndex(settings.index, log, Clock(), settings.nats, tracing=events_of(tracing))
        registry = new_registry()
        Projection(registry, index.families)
        Projection(registry, lambda: span_families(None if tracing is None else tracing.exporter))
        app = index_app(index, registry, token=settings.control.token.get_secret_value())
        http = HttpServer(app, settings.control.host, settings.control.port, hosts=settings.control.host_names())
        await http.start()
        await index.start()
        print(f"index on {url_of(settings.control.host, http.port)}", flush=True)
        spans = [] if tracing is None else [tracing.exporter.part(2)]
        await run_parts([Part("http", http.run, 0, dict), *index.parts(1), *spans], stop=stop, drain_s=10)


if __name__ == "__main__":
    main()
