"""`worker-agent consolidate`: streams of a host's engines that publish their KV events themselves."""

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version

import zmq.asyncio

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog, log_families
from kv_runtime.http.connection_limit import CONTROL_CONNECTIONS_MAX
from kv_runtime.http.hosts import url_of
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part, run_parts
from kv_runtime.telemetry import Projection, new_registry
from kv_runtime.tracing.exporter import span_families
from kv_runtime.tracing.service import Tracing, events_of, opened_event_tracing
from worker_agent.api.status import StatusApi
from worker_agent.api.tracing import SERVICE
from worker_agent.attached.config import ConsolidateSettings
from worker_agent.attached.streams import event_path
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.event_path import end_unrun
from worker_agent.events.metrics import ConsolidatorMetrics

_DRAIN_S = 10.0


async def run_consolidated(settings: ConsolidateSettings, stop: asyncio.Event, report: Callable[[str], None]) -> None:
    """Publish the streams until `stop` is set; `report` receives the address of their status.

    Raises:
        ConfigurationError: no worker is configured, or what is said of tracing is not allowed.
    """
    if not settings.workers:
        raise ConfigurationError(["workers: found none, allowed at least one"])
    names, nats = " ".join(worker.id for worker in settings.workers), settings.nats
    token = nats.credentials.get_secret_value()
    async with AsyncExitStack() as cleanup:
        name = f"worker-agent {names}"
        log = await EventLog.connect(nats.url, name=name, user=nats.user, token=token, awaited_until=stop)
        cleanup.push_async_callback(log.close)
        context = zmq.asyncio.Context()
        cleanup.callback(context.destroy, linger=0)
        tracing = opened_event_tracing(settings.tracing, os.environ, uuid.uuid4().hex, service=SERVICE)
        paths = [
            event_path(worker, settings.events, log, context, SystemClock(), tracing=events_of(tracing))
            for worker in settings.workers
        ]
        heads, parts = [path.consolidator for path in paths], [part for path in paths for part in path.parts(0)]
        async with AsyncExitStack() as until_run:
            until_run.push_async_callback(end_unrun, parts)
            http = await _begun(settings, heads, log, tracing)
            until_run.pop_all()  # from here on the parts own the sockets
        report(f"streams of {names}, status on {url_of(settings.control.host, http.port)}")
        parts += [Part("http", http.run, 5, dict), Part("event-log", log.run, 5)]
        parts += [] if tracing is None else [tracing.exporter.part(5)]
        await run_parts(parts, stop=stop, drain_s=_DRAIN_S)


async def _begun(
    settings: ConsolidateSettings, heads: Sequence[Consolidator], log: EventLog, tracing: Tracing | None
) -> HttpServer:
    """Start the status server and the consolidators, which accept recovery questions from now on."""
    control, registry = settings.control, new_registry()
    Projection(registry, ConsolidatorMetrics(heads).families)
    Projection(registry, lambda: log_families(log.statistics()))
    Projection(registry, lambda: span_families(None if tracing is None else tracing.exporter))
    api = StatusApi(lambda: heads, version("kv-router"))
    app = api.app(registry, token=control.token.get_secret_value())
    http = HttpServer(
        app, control.host, control.port, hosts=control.host_names(), connections_max=CONTROL_CONNECTIONS_MAX
    )
    await http.start()
    for head in heads:
        await head.start()
    return http
