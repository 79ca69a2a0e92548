"""`router --processes N`: one router as N serving processes and one that has the index and the control plane.

    stage 0    the event log, where none is named: a process that runs the nats-server
    stage 1    the index: it follows the log, and answers on the control address
    stage 2    the serving processes: each accepts clients from the same sockets, and matches in the shared index

The serving processes share their ledger as any routers of a fleet do.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from indexer.embedded import EmbeddedIndex, SharedIndex, ensure_streams
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import LeaseEvent
from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.rendering import without_user
from kv_runtime.event_log import EventLog
from kv_runtime.http.acceptor import listening_at_path, listening_sockets, port_of
from kv_runtime.http.connection_limit import CONTROL_CONNECTIONS_MAX
from kv_runtime.http.server import HttpServer
from kv_runtime.nats_server import EmbeddedNats, nats_server_families
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, run_parts
from kv_runtime.telemetry import LoopLag, Projection, new_registry
from kv_runtime.text.model import Text
from kv_runtime.tracing.exporter import span_families
from kv_runtime.tracing.service import events_of, opened_event_tracing
from router.admin.control_plane import ControlPlane
from router.admin.metrics import trust_families
from router.cli.router_parts import RouterParts, ServingPlace, state_settings, watches
from router.cli.serve import EXPECTED, connected, embedded_nats, text_and_policies
from router.config import RouterSettings
from router.decision.policy_store import PolicyStore
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.fleet.feeds import RouterFeeds
from router.live.evidence import event_log_routes
from router.live.moments import Moments
from router.live.routes import LiveRoutes
from router.live.service import Live
from router.processes.directory import own_directory
from router.processes.front import Front
from router.processes.gathered import PassedElsewhere, TailOfProcesses
from router.processes.links import Links
from router.processes.supervisor import BEAT_S, Child, ProcessesFailed, Role, Supervisor, Tally
from router.queue.tenants import SECRET_BYTES
from router.replicas.service import Replicas

_INDEX, _LOG = "index", "event-log"
_INDEX_STOP_S, _LOG_STOP_S = 10.0, 5.0
_LATE_S = 2.0
"""How long after its own time to stop a process is killed."""


def run_processes(settings: RouterSettings, given: frozenset[str]) -> None:
    """Serve in `data.processes` processes until a signal comes; raises what `EXPECTED` names."""
    if not settings.ledger.replicas:
        raise ConfigurationError(["ledger.replicas: found false, allowed true: several processes share one ledger"])
    text, policies = text_and_policies(settings, given)
    shared = SharedIndex(settings.index, settings.data.processes)
    directory = own_directory(Path(tempfile.gettempdir()))
    policies.share(directory / "policy.json")
    try:
        fleet = _Processes(_of_each(settings), text, policies, shared, directory)
        fleet.run()
    except ProcessesFailed as error:
        sys.exit(f"router: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _of_each(settings: RouterSettings) -> RouterSettings:
    """Return the settings of one process: it hands over its share of a draining worker's tokens."""
    tokens = -(-settings.handover.tokens // settings.data.processes)
    return settings.model_copy(update={"handover": settings.handover.model_copy(update={"tokens": tokens})})


class _Processes:
    """What the parent opens, and the work of each process."""

    def __init__(
        self, settings: RouterSettings, text: Text, policies: PolicyStore, shared: SharedIndex, directory: Path
    ) -> None:
        self._settings, self._text, self._policies, self._shared = settings, text, policies, shared
        data, control = settings.data, settings.control
        self._data = listening_sockets(data.host, data.port, reuse_port=data.reuse_port)
        self._control = listening_sockets(control.host, control.port)
        self._paths = {f"serving-{number}": directory / f"serving-{number}.sock" for number in range(data.processes)}
        self._private = {name: listening_at_path(path) for name, path in self._paths.items()}
        self._shadows = directory / "shadows.json"
        self._secret = os.urandom(SECRET_BYTES)
        self._nats_server = embedded_nats(settings)
        self._serving_stop_s = data.drain_s + 2 * data.limits().linger_s + 1
        stop_s = self._serving_stop_s + _LATE_S
        nats, log_stop_s = self._nats_server, _LOG_STOP_S + _LATE_S
        roles = [
            *([] if nats is None else [Role(_LOG, 0, partial(self._run_log, nats), log_stop_s)]),
            Role(_INDEX, 1, self._run_index, _INDEX_STOP_S + _LATE_S, on_ended=shared.on_writer_ended),
            *(Role(name, 2, partial(self._run_serving, number), stop_s) for number, name in enumerate(self._paths)),
        ]
        self._tally = Tally([role.name for role in roles])
        self._supervisor = Supervisor(roles, self._tally)

    def run(self) -> None:
        """Return when all processes have ended; raise `ProcessesFailed` where they have not done so as they should."""
        self._supervisor.run(self._announce, self._close)

    def _announce(self) -> None:
        settings = self._settings
        click.echo(
            f"router on      http://{settings.data.host}:{port_of(self._data)}  (mode {self._policies.initial.mode})"
        )
        click.echo(f"control plane  http://{settings.control.host}:{port_of(self._control)}")
        click.echo(f"event log      {without_user(self._log_url)}")
        click.echo(f"processes      {settings.data.processes} serve, 1 has the index")

    def _close(self) -> None:
        """Leave the sockets to the processes: with the last of them they are closed."""
        for each in (*self._data, *self._control, *self._private.values()):
            each.close()

    @property
    def _log_url(self) -> str:
        return self._nats_server.url if self._nats_server else self._settings.nats.url

    # ---------------------------------------------------------------------------------------------- in the processes

    def _run_log(self, nats: EmbeddedNats, child: Child) -> None:
        async def serve(stop: asyncio.Event, cleanup: AsyncExitStack) -> None:
            cleanup.push_async_callback(nats.stop)
            if _LOG not in child.told:  # a process that was started again goes on trying, in `run`
                await nats.start()
            child.say({})
            await run_parts([Part("nats-server", nats.run, 0)], stop=stop, drain_s=_LOG_STOP_S)

        self._run_child(child, serve)

    def _run_index(self, child: Child) -> None:
        async def serve(stop: asyncio.Event, cleanup: AsyncExitStack) -> None:
            log = await connected(self._settings, self._log_url, cleanup)
            links = await cleanup.enter_async_context(Links(self._paths, SystemClock()))
            parts = _IndexParts(self._settings, self._text, self._policies, log, self._shared, self._nats_server)
            await parts.start(links, self._tally, self._control, self._shadows)
            child.say({})
            await run_parts(parts.parts(), stop=stop, drain_s=_INDEX_STOP_S)

        self._run_child(child, serve)

    def _run_serving(self, number: int, child: Child) -> None:
        async def serve(stop: asyncio.Event, cleanup: AsyncExitStack) -> None:
            log = await connected(self._settings, self._log_url, cleanup)
            own = self._private[f"serving-{number}"]
            beats = partial(self._tally.beats, _INDEX)
            place = ServingPlace(number, self._shared, self._data, own, self._secret, self._shadows, beats)
            parts = RouterParts(self._settings, self._text, self._policies, log, place)
            await parts.start(stop)
            child.say({})
            await run_parts(parts.parts(), stop=stop, drain_s=self._serving_stop_s)

        self._run_child(child, serve)

    def _run_child(
        self, child: Child, serve: Callable[[asyncio.Event, AsyncExitStack], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `serve` until the parent says so, or is gone; an expected error ends the process with one line."""

        async def main(stop: asyncio.Event) -> None:
            loop = asyncio.get_running_loop()
            loop.add_reader(child.parent, stop.set)

            def beat() -> None:
                child.beat()
                loop.call_later(BEAT_S, beat)

            beat()
            async with AsyncExitStack() as cleanup:
                await serve(stop, cleanup)

        try:
            run_process(main)
        except EXPECTED as error:
            sys.exit(f"router: {error}")


class _IndexParts:
    """The parts of the process with the index: it follows the fleet as a router that takes no requests."""

    def __init__(
        self,
        settings: RouterSettings,
        text: Text,
        policies: PolicyStore,
        log: EventLog,
        shared: SharedIndex,
        nats_server: EmbeddedNats | None,
    ) -> None:
        self._nats_server = nats_server
        self._settings, self._log, self._policies = settings, log, policies
        policies.take()
        self._clock, self._registry = SystemClock(), new_registry()
        name = f"index-{uuid.uuid4().hex[:8]}"
        self._tracing = opened_event_tracing(settings.tracing, os.environ, name)
        self._index = EmbeddedIndex(
            settings.index,
            log,
            self._clock,
            settings.nats,
            logs_announced=False,
            shared=shared,
            tracing=events_of(self._tracing),
        )
        self._routing = Routing(
            RouterState(state_settings(settings, text), policies.modes),
            self._index,
            self._clock,
            policies.initial,
            seed=settings.policy.seed,
            lease_s=settings.ledger.lease_s,
            decisions_max=1,
        )
        self._gate = FleetGate(settings.nats.fleet_secrets)
        self._feeds = RouterFeeds(self._routing, log, self._clock, self._gate)
        self._replicas = Replicas(
            log, self._clock, router_id=name, model_of=self._model_of, apply=self._apply_of_another
        )
        self._server: HttpServer
        self._live: Live
        self._moments = Moments(log.url, settings.nats, settings.index, self._clock)

    def _model_of(self, worker_id: str) -> str | None:
        worker = self._routing.state.fleet.worker(worker_id)
        return None if worker is None else worker.registration.model

    def _apply_of_another(self, event: LeaseEvent, router: str) -> None:
        self._routing.apply(LedgerApplied(now_s=self._clock.now(), event=event, router=router))

    async def start(self, links: Links, tally: Tally, control: list[Any], shadows: Path) -> None:
        """Follow the log, and serve the control plane."""
        settings = self._settings
        await ensure_streams(self._log, settings.nats)
        self._live = Live(
            self._routing,
            self._index,
            self._clock,
            TailOfProcesses(links, self._clock),
            ring_bytes_max=settings.live.history_bytes_max,
        )
        plane = ControlPlane(
            self._routing,
            self._index,
            self._log,
            None,
            self._gate,
            self._policies,
            heat=PassedElsewhere(links, self._clock),
            moments=self._moments,
            watched=[*LiveRoutes(self._live, self._clock).routes(), *event_log_routes(self._index)],
        )
        rows_max = settings.report.rows_max
        front = Front(plane, links, tally, self._registry, shadows, report_rows_max=rows_max)
        families = [
            lambda: trust_families(self._routing),
            lambda: span_families(None if self._tracing is None else self._tracing.exporter),
            self._index.families,
            self._live.families,
            self._moments.families,
            front.families,
            lambda: nats_server_families(self._nats_server),
        ]
        for each in families:
            Projection(self._registry, each)
        self._server = HttpServer(
            front.app(token=settings.control.token.get_secret_value()),
            settings.control.host,
            0,
            hosts=settings.control.host_names(),
            connections_max=CONTROL_CONNECTIONS_MAX,
        )
        await self._server.start(listening=control)
        await self._index.start()
        await self._feeds.start()
        await self._replicas.start()

    def parts(self) -> list[Part]:
        """Return the parts to run."""
        return [
            Part("live", self._live.run, 0),
            Part("moments", self._moments.run, 0),
            Part("control-plane", self._server.run, 1),
            Part("feeds", self._feeds.run, 2),
            *watches(self._routing, self._clock, 2),
            Part("loop-lag", LoopLag(self._registry, self._clock).run, 2),
            Part("replicas", self._replicas.run, 2),
            *([] if self._tracing is None else [self._tracing.exporter.part(2)]),
            *self._index.parts(3),
        ]
