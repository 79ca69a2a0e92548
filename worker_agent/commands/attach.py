"""`worker-agent attach`: brings an engine that runs in another process into the fleet, while this process runs.

It is one `AttachedWorker` with a connection to the log and a status page of its own.
"""

import asyncio
import os
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack

import zmq.asyncio

from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.http.hosts import url_of
from kv_runtime.supervise import Part, run_parts
from kv_runtime.text.loading import load_text
from kv_runtime.tracing.service import opened_event_tracing, opened_tracing
from worker_agent.api.status import status_server
from worker_agent.api.tracing import SERVICE
from worker_agent.attached.config import AttachSettings
from worker_agent.attached.worker import AttachedWorker, Host, check

_MARGIN_S = 2.0


async def run_attached(settings: AttachSettings, stop: asyncio.Event, report: Callable[[str], None]) -> None:
    """Represent the engine until `stop` is set; `report` receives one line: what was found, and the status page.

    Raises: as `AttachedWorker.run`, and `PortUsed` for the status page's port.
    """
    settings = settings.model_copy(update={"worker": settings.worker.identified()})
    check(settings)
    async with AsyncExitStack() as cleanup:
        log = await EventLog.connect(
            settings.nats.url,
            name=f"worker-agent {settings.worker.id}",
            user=settings.nats.user,
            token=settings.nats.credentials.get_secret_value(),
            awaited_until=stop,
        )
        cleanup.push_async_callback(log.close)
        context = zmq.asyncio.Context()
        cleanup.callback(context.destroy, linger=0)
        opened = opened_event_tracing if settings.engine.requests == "direct" else opened_tracing
        tracing = opened(settings.tracing, os.environ, uuid.uuid4().hex[:16], service=SERVICE)
        host = Host(log, context, SystemClock(), FleetGate(settings.nats.fleet_secrets), load_text, tracing)
        worker = AttachedWorker(settings, host, lambda line, _: report(f"streams of {line}; status on {at}"))
        http = status_server(
            settings.control,
            log,
            tracing,
            lambda: worker.consolidators,
            families=worker.families,
            sources=worker.polled_status,
        )
        await http.start()
        at = url_of(settings.control.host, http.port)
        spans = [] if tracing is None else [tracing.exporter.part(1)]
        parts = [Part("worker", worker.run, 0), *spans, Part("http", http.run, 1, dict), Part("event-log", log.run, 2)]
        await run_parts(parts, stop=stop, drain_s=worker.drain_s + _MARGIN_S)
