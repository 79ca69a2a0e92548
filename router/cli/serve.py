"""The router's own process: the only place that knows all of its classes. `router` and `router pools` start it."""

import asyncio
import os
import sys
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import structlog

from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import LeaseEvent
from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError, given_paths, load_settings
from kv_runtime.config.rendering import render, without_user
from kv_runtime.event_log import BrokerUnavailable, EventLog, StreamUnfit
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.http.connection_limit import CONTROL_CONNECTIONS_MAX
from kv_runtime.http.server import HttpServer
from kv_runtime.nats_server import EmbeddedNats, NatsServerError
from kv_runtime.supervise import Part, run_parts, run_process
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from kv_runtime.text.chat_template import TextError
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from router.admin.control_plane import ControlPlane
from router.admin.metrics import (
    RequestMetrics,
    build_families,
    http_families,
    policy_families,
    prompt_families,
    queue_families,
    state_families,
    trust_families,
)
from router.cli.pools import pools_command
from router.compiled import hot_path
from router.config import RouterSettings
from router.decision.policy import Policy
from router.decision.policy_loader import load_modes
from router.decision.policy_store import PolicyStore
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.drain.handover import Handover
from router.drain.recent_prompts import RecentPrompts
from router.drain.warming import Warming
from router.fleet.feeds import RouterFeeds
from router.fleet.registry import TextDigests
from router.fleet.trust_watch import TrustWatch
from router.fleet.watch import FleetWatch
from router.journal.records import Recorders
from router.journal.writer import JournalWriter, ensure_journal, journal_families, router_name
from router.names import Names
from router.native import load as load_table_in_cpp
from router.pools.process import OpenedRouter
from router.prompt import ModelPrompts
from router.queue.gate import Admission, FleetHeadroom
from router.queue.tenants import SECRET_BYTES, TenantNames
from router.replicas.service import Replicas, replica_families
from router.request.endpoints import Endpoints
from router.request.serving import Serving
from router.server.capacity import TooFewFiles
from router.server.plane import HttpPlane

_OTHER_STREAMS_BYTES = 256 << 20
"""Room in the embedded server's store for all streams but those of events, snapshots and the journal."""
_INDEX_NAMES = {"native": "C++", "python": "Python"}
_log = structlog.get_logger("router")
_EXPECTED = (ConfigurationError, BrokerUnavailable, StreamUnfit, NatsServerError, PortUsed, TextError, TooFewFiles)


def run(flags: Mapping[str, Any], *, file: Path | None, assignments: tuple[str, ...], print_config: bool) -> None:
    """Serve until a signal comes, or print the settings; an expected error ends the process with one line."""
    try:
        settings = load_settings(RouterSettings, file=file, assignments=assignments, flags=flags)
        if print_config:
            click.echo(render(settings), nl=False)
            return
        configure_logs(settings.telemetry.log_level, settings.telemetry.log_format)
        given = given_paths(RouterSettings, assignments, flags)
        run_process(lambda stop: _serve(settings, stop, given))
    except _EXPECTED as error:
        sys.exit(f"router: {error}")


async def _serve(settings: RouterSettings, stop: asyncio.Event, given: frozenset[str]) -> None:
    async with AsyncExitStack() as cleanup:
        router = await _opened(settings, stop, cleanup, given)
        click.echo(f"router on      {router.data_url}  (mode {router.mode})")
        click.echo(f"control plane  {router.control_url}")
        click.echo(f"event log      {without_user(router.log_url)}")
        click.echo(f"running        index: {_INDEX_NAMES[router.index_name]}, hot path: {hot_path()}")
        await run_parts(router.parts, stop=stop, drain_s=router.drain_s)


async def _opened(
    settings: RouterSettings, stop: asyncio.Event, cleanup: AsyncExitStack, given: frozenset[str] = frozenset()
) -> OpenedRouter:
    """Return a started router, to be run; raises what `_EXPECTED` names.

    `given` are the paths of what the command line says: it wins over a policy that was stored.
    """
    text = load_text(settings.tokens.text, settings.tokens.encoder, chat_template=settings.tokens.chat_template)
    modes = load_modes(settings.policy.user_modes, settings.policy.mode)
    policies = PolicyStore(settings.state.dir, settings.policy.policy(), modes)
    policies.restore({path.removeprefix("policy.") for path in given if path.startswith("policy.")})
    embedded = await _embedded_nats(settings, cleanup)
    url = embedded.url if embedded else settings.nats.url
    token = settings.nats.credentials.get_secret_value()
    log = await EventLog.connect(url, name="router", user=settings.nats.user, token=token)
    cleanup.push_async_callback(log.close)
    if load_table_in_cpp() is None:
        _log.warning("native_load_table_missing")
    router = _RouterParts(settings, text, policies, log)
    await router.start(stop)
    return OpenedRouter(
        data_url=f"http://{settings.data.host}:{router.data.port}",
        control_url=f"http://{settings.control.host}:{router.control.port}",
        log_url=url,
        mode=policies.initial.mode,
        index_name=router.index_name,
        parts=[*router.parts(), *([Part("nats-server", embedded.run, 4)] if embedded else [])],
        drain_s=settings.data.drain_s + 2 * router.data.limits.linger_s + 1,
    )


class _RouterParts:
    """The parts of the process, created and connected; `start` opens what is needed before they run."""

    def __init__(self, settings: RouterSettings, text: Text, policies: PolicyStore, log: EventLog) -> None:
        self._settings, self._log = settings, log
        self._clock, self._registry = SystemClock(), new_registry()
        instance = uuid.uuid4().hex
        self._index = EmbeddedIndex(settings.index, log, self._clock, settings.nats, logs_announced=False)
        folds = _folds(settings, text)
        name = router_name(settings.journal, instance)
        state = folds.state(policies.modes)
        self._journal = self._writer(name, folds, state) if settings.journal.enabled else None
        self._replicas = self._sharing(name) if settings.ledger.replicas else None
        self._routing = self._router(state, policies.initial)
        gate = FleetGate(settings.nats.fleet_secrets)
        self._feeds = RouterFeeds(self._routing, log, self._clock, gate)
        headroom = FleetHeadroom(self._routing, settings.queue.threshold)
        self._admission = Admission(self._clock, headroom, settings.queue.limits())
        metrics = RequestMetrics(self._registry, self._routing.state, tuple(policies.modes))
        self._prompts = ModelPrompts(text, settings.tokens.limits(), hashed=partial(metrics.stage, "hash"))
        tenants = TenantNames(settings.queue.fair_share_by, settings.queue.fair_share_header, os.urandom(SECRET_BYTES))
        new_id = Names(instance).new
        recent = RecentPrompts(settings.handover.prompts_bytes_max)
        serving = Serving(self._routing, self._prompts, self._admission, metrics, tenants, settings, new_id, recent)
        self._bodies = serving.bodies
        endpoints = Endpoints(serving, index_name=self._index.implementation)
        self.data = HttpPlane(endpoints, settings.data.limits(), sites=settings.data.sites())
        self._handover = Handover(serving, recent, Warming(serving, self.data.upstreams), settings.handover)
        control = ControlPlane(self._routing, self._index, log, self._handover, gate, policies)
        app = control.app(self._registry, token=settings.control.token.get_secret_value())
        self.control = HttpServer(
            app,
            settings.control.host,
            settings.control.port,
            hosts=settings.control.host_names(),
            connections_max=CONTROL_CONNECTIONS_MAX,
        )
        self._project()

    @property
    def index_name(self) -> str:
        """The index that is in use."""
        return self._index.implementation

    def _writer(self, name: str, folds: StateSettings, state: RouterState) -> JournalWriter:
        return JournalWriter(
            self._log,
            self._clock,
            self._settings.journal,
            router=name,
            made_of=folds,
            state=state,
            kv_seq=self._index.log_seq,
        )

    def _sharing(self, name: str) -> Replicas:
        return Replicas(self._log, self._clock, router_id=name, model_of=self._model_of, apply=self._apply_of_another)

    def _model_of(self, worker_id: str) -> str | None:
        worker = self._routing.state.fleet.worker(worker_id)
        return None if worker is None else worker.registration.model

    def _apply_of_another(self, event: LeaseEvent, router: str) -> None:
        self._routing.apply(LedgerApplied(now_s=self._clock.now(), event=event, router=router))

    def _router(self, state: RouterState, policy: Policy) -> Routing:
        settings = self._settings
        return Routing(
            state,
            self._index,
            self._clock,
            policy,
            seed=settings.policy.seed,
            lease_s=settings.ledger.lease_s,
            decisions_max=settings.journal.decisions_max,
            recorder=Recorders(*(each for each in (self._journal, self._replicas) if each is not None)),
        )

    def _project(self) -> None:
        families = [
            lambda: build_families(self._index.implementation),
            lambda: state_families(self._routing.state, self._feeds),
            lambda: trust_families(self._routing),
            lambda: policy_families(self._routing),
            lambda: queue_families(self._admission.statistics()),
            lambda: http_families(self.data.statistics()),
            lambda: prompt_families(self._prompts.statistics()),
            self._handover.families,
            self._index.families,
        ]
        if (journal := self._journal) is not None:
            families.append(lambda: journal_families(journal.statistics()))
        if (replicas := self._replicas) is not None:
            families.append(lambda: replica_families(replicas))
        for each in families:
            Projection(self._registry, each)

    async def start(self, stop: asyncio.Event) -> None:
        """Read the log and the fleet, and bind both planes' addresses; raises what `_EXPECTED` names."""
        settings = self._settings
        await ensure_streams(self._log, settings.nats)
        if self._journal is not None:
            await ensure_journal(self._log, settings.journal, settings.nats)
        await self.control.start()
        await self._index.start()
        await self._feeds.start()
        if self._replicas is not None:
            await self._replicas.start()
        await self._feeds.acquainted(stop)
        await self.data.start(settings.data.host, settings.data.port, reuse_port=settings.data.reuse_port)

    def parts(self) -> list[Part]:
        """Return the parts to run; a part stops before those that it depends on."""
        return [
            Part("data-plane", self.data.run, 0, self.data.in_progress),
            Part("handover", self._handover.run, 0),
            Part("control-plane", self.control.run, 1),
            Part("admission", self._admission.run, 1),
            *self._bodies.parts(1),
            *self._prompts.parts(1),
            Part("feeds", self._feeds.run, 2),
            Part("trust-watch", TrustWatch(self._routing, self._clock).run, 2),
            Part("fleet-watch", FleetWatch(self._routing, self._clock).run, 2),
            Part("loop-lag", LoopLag(self._registry, self._clock).run, 2),
            *([] if self._replicas is None else [Part("replicas", self._replicas.run, 2)]),
            *([] if self._journal is None else [Part("journal", self._journal.run, 2)]),
            *self._index.parts(3),
        ]


def _folds(settings: RouterSettings, text: Text) -> StateSettings:
    return StateSettings(
        text=TextDigests(text.tokenizer_digest, text.template_digest),
        lease_s=settings.ledger.lease_s,
        approximate=settings.policy.approximate(),
        affinity=settings.policy.affinity_limits(),
        breakers=settings.failures.breakers(),
    )


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


pools = pools_command(_opened, _EXPECTED)
"""The command `router pools`, which may open a router in its own process."""
