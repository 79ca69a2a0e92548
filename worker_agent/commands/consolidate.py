"""`worker-agent consolidate`: streams of a host's engines that publish their KV events themselves."""

import asyncio
import os
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack

import zmq.asyncio

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import EventLog
from kv_runtime.http.hosts import url_of
from kv_runtime.supervise import Part, run_parts
from kv_runtime.tracing.service import events_of, opened_event_tracing
from worker_agent.api.status import status_server
from worker_agent.api.tracing import SERVICE
from worker_agent.attached.config import ConsolidateSettings
from worker_agent.attached.streams import event_path
from worker_agent.events.event_path import end_unrun

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
            http = status_server(settings.control, log, tracing, lambda: heads)
            await http.start()
            for head in heads:
                await head.start()  # it accepts recovery questions from now on
            until_run.pop_all()  # from here on the parts own the sockets
        report(f"streams of {names}, status on {url_of(settings.control.host, http.port)}")
        parts += [Part("http", http.run, 5, dict), Part("event-log", log.run, 5)]
        parts += [] if tracing is None else [tracing.exporter.part(5)]
        await run_parts(parts, stop=stop, drain_s=_DRAIN_S)
