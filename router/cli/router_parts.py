"""Creates and connects the parts of a router that serves: the only module that knows all of their classes."""

import asyncio
import json
import os
import uuid
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog
from aiohttp import web

from indexer.embedded import EmbeddedIndex, ensure_streams
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.extras import require
from kv_runtime.http.hosts import url_of
from kv_runtime.http.server import HttpServer
from kv_runtime.nats_server import EmbeddedNats, nats_server_families
from kv_runtime.process import print_lines
from kv_runtime.supervise import Part
from kv_runtime.telemetry import LoopLag, Projection, new_registry
from kv_runtime.text.model import Text
from kv_runtime.tracing.service import events_of, opened_tracing, span_families
from router.attribution.report import Figures
from router.attribution.service import Savings
from router.config import RouterSettings
from router.control_plane import ControlPlane
from router.decision.policy_store import PolicyStore
from router.decision.routing import Routing
from router.decision.state import LEASE_S, RouterState, StateSettings
from router.drain.handover import Handover
from router.engine_attacher import EngineAttacher
from router.feeds.feeds import RatesStore, RouterFeeds
from router.feeds.watch import EventOrigins, FleetWatch
from router.fleet.registry import TextDigests
from router.http.plane import HttpPlane
from router.journal.log import JournalWriter, ensure_journal, router_name
from router.live.routes import event_log_route, json_route, live_routes
from router.live.service import SAVED, Live, Row
from router.metrics import (
    PickerStatistics,
    RequestMetrics,
    http_families,
    picker_families,
    prompt_families,
    rank_families,
    state_families,
)
from router.planner.service import Planner
from router.processes.supervisor import ProcessState, process_families
from router.prompt.chains import KeptPrompts, RecentPrompts
from router.prompt.engine_parity import EngineParity
from router.prompt.prompts import ModelPrompts
from router.queue.gate import Admission
from router.queue.tenants import SECRET_BYTES, TenantNames
from router.replicas.service import Replicas
from router.request.endpoints import endpoints
from router.request.serving import Serving
from router.request.tracing import Tracer
from router.shadows.service import Shadows

if TYPE_CHECKING:
    from router.endpoint_picker.service import EndpointPicker

_TRIED = (
    "Explain in three short sentences how the prefix cache of a language model saves time when many requests begin with"
    " the same words, as this one does when it is sent twice: see x-overlap-blocks in the head of the second answer."
)

_log = structlog.get_logger("router")


class ServingProcess(NamedTuple):
    """One of the processes that are one router together (`data.processes`)."""

    number: int
    """From 0; process 0 stores what survives a restart."""
    secret: bytes
    """Tenants' names are made with it, so that they are the same in all processes."""
    policy: bytes = b""
    shadows: bytes = b""
    """Bodies of `PUT /v1/policy` and `PUT /v1/shadows`, if they were changed before this process started."""


class RouterParts:
    """The parts of the process, created and connected; `start` opens what is needed before they run.

    After `start` there are `data_url`, `control_url`, `log_url`, and `picker_address`: empty without an endpoint
    picker. `drain_s`: how long the parts may take to stop.
    """

    def __init__(
        self,
        settings: RouterSettings,
        text: Text,
        policies: PolicyStore,
        log: EventLog,
        process: ServingProcess | None = None,
        *,
        nats_server: EmbeddedNats | None = None,
        directory: str = "",
    ) -> None:
        """`process`: None if the router has one process.

        `directory` is where the text was loaded from.
        """
        self._settings, self._log, self._process, self._nats_server = settings, log, process, nats_server
        self._clock, self.registry, self._is_shown = Clock(), new_registry(), False
        instance = uuid.uuid4().hex
        name = router_name(settings.journal, instance)
        of_requests = settings.tracing
        self._tracing = opened_tracing(
            of_requests, os.environ, name, ratio=of_requests.ratio, ttft_target_s=of_requests.ttft_target_s
        )
        if process is not None:
            policies.begin_with(process.policy)
        self._index = EmbeddedIndex(
            settings.index, log, self._clock, settings.nats, logs_announced=False, tracing=events_of(self._tracing)
        )
        folds = StateSettings(
            text=TextDigests(text.tokenizer_digest, text.template_digest),
            approximate=settings.policy.approximate(),
            affinity=settings.policy.affinity_limits(),
            breakers=settings.failures.breakers(),
        )
        state = RouterState(folds, policies.modes)
        self._journal = None
        if settings.journal.enabled:
            self._journal = JournalWriter(
                log, self._clock, settings.journal, router=name, made_of=folds, state=state, kv_seq=self._index.log_seq
            )
        process_name = "" if process is None else f"serving-{process.number}"
        self._savings = Savings(settings.report, state.core, self._clock, process_name)
        writer = self._journal
        self._routing = Routing(
            state,
            self._index,
            self._clock,
            policies.initial,
            seed=settings.policy.seed,
            lease_s=LEASE_S,
            decisions_max=settings.journal.decisions_max,
            journal=None if writer is None else writer.encoder.journal,
            recorders=() if writer is None else (writer.encoder.record,),
            noted=() if writer is None else (writer.problem,),
        )
        self._replicas = Replicas(self._routing, log, name) if settings.ledger.replicas else None
        self._shadows = Shadows(self._routing, settings.shadow)
        if process is not None and process.shadows:
            self._shadows.change(settings.shadow.replaced(msgspec.json.decode(process.shadows)))
        self._origins = EventOrigins(self._routing, self._index)
        self._watch = FleetWatch(self._routing, self._index.resyncs)
        self._planner = Planner(self._routing, settings.planner)
        gate = FleetGate(settings.nats.fleet_secrets)
        self._rates = RatesStore(settings.state.dir, self._routing)
        self._feeds = RouterFeeds(self._routing, log, gate, (self._watch.look, self._origins.look))
        self._admission = Admission(self._routing, settings.queue)
        self._recent = RecentPrompts()
        self._kept = KeptPrompts(text.decode) if settings.control.keep_text else None
        serving = self._serving_of(text, instance, tuple(policies.modes))
        replies = endpoints(serving, passed_paths=settings.data.passed_paths)
        data, credentials = settings.data, settings.data.credentials(self._clock)
        self.data = HttpPlane(replies, data.limits(), posts=replies.posts, sites=data.sites(), credentials=credentials)
        self.drain_s = data.drain_s + 2 * self.data.limits.linger_s + 1
        self.picker = self._picker_of(serving) if settings.picker.enabled else None
        self._handover = Handover(serving, self._recent, self.data.upstreams, settings.handover.tokens)
        self.policies = policies
        queued = None if process else lambda: len(self._admission.queue)
        sums, bounds_s = partial(self._sums_of, serving), serving.metrics.ttft_bounds_s
        self._live = Live(self._routing, self._index, sums, bounds_s, queued=queued)
        self._attacher = EngineAttacher(settings, log, self._clock, {directory: text}, self._on_attached)
        self.control = self._control_of(gate)
        self._project()

    def _sums_of(self, serving: Serving) -> Row:
        requests, first_tokens = serving.metrics.arrived()
        saved = Figures.of(self._savings.attribution.total())
        return Row(
            requests=requests,
            first_tokens=first_tokens,
            **{name: getattr(saved, name) for name in SAVED},
            in_flight=sum(load.active_requests for load in self._routing.state.loads().values()),
            event_lag_s=self._index.event_lag_s(),
        )

    def _serving_of(self, text: Text, instance: str, modes: tuple[str, ...]) -> Serving:
        settings, process, tracing = self._settings, self._process, self._tracing
        metrics = RequestMetrics(self.registry, self._routing, modes)
        hashed = metrics.observer("hash")
        cache_bytes_max, threads = settings.tokens.cache_bytes_max, settings.tokens.threads
        self._prompts = ModelPrompts(text, cache_bytes_max=cache_bytes_max, threads=threads, hashed=hashed)
        secret = os.urandom(SECRET_BYTES) if process is None else process.secret
        new_id = map((instance[:16] + "%016x").__mod__, count(1)).__next__  # a unique name of 32 hex digits
        token = settings.data.worker_token.get_secret_value()
        self._parity = EngineParity(self._routing.state.fleet, self._prompts, text, self._clock, token)
        return Serving(
            self._routing,
            self._prompts,
            self._admission,
            metrics,
            TenantNames(settings.queue.fair_share_by, secret),
            settings,
            new_id,
            self._recent,
            kept=self._kept,
            sample=self._parity.sample,
            tracer=None
            if tracing is None or tracing.sampling is None
            else Tracer(tracing.sampling, tracing.exporter.put, "https" if settings.data.tls_certificate else "http"),
        )

    def _control_of(self, gate: FleetGate) -> HttpServer:
        settings, process = self._settings, self._process
        control = ControlPlane(
            self._routing,
            self._index,
            self._log,
            self._handover,
            gate,
            None if process and process.number else self.policies,
            trace_link=settings.tracing.link,
            shadows=self._shadows,
            kept=self._kept,
            differs=lambda at, instance: (*self._parity.differs(at, instance), *self._origins.differs(at)),
            attacher=self._attacher if process is None else None,
            watched=[
                *live_routes(self._live, self._watch.marks),
                web.get("/v1/planner", self._planner.show),
                json_route("/v1/report", self._savings.report),
                event_log_route(self._index, self._journal if process is None else None),
            ],
        )
        return settings.control.server(control.app(self.registry, token=settings.control.token.get_secret_value()))

    def _picker_of(self, serving: Serving) -> "EndpointPicker":
        require("gateway", "router", "picker.enabled")
        from router.endpoint_picker.service import EndpointPicker  # noqa: PLC0415 - it needs an extra

        return EndpointPicker(serving, self.data, self._settings.picker, shares_port=self._process is not None)

    def _project(self) -> None:
        parts = (
            self._parity, self._handover, self._planner, self._shadows, self._savings, self._index, self._live,
            self._attacher, self._journal, self._replicas,
        )  # fmt: skip
        families = [
            lambda: state_families(self._routing.state, self._feeds, self._admission.queue),
            lambda: rank_families(self._routing),
            lambda: http_families(self.data),
            lambda: prompt_families(self._prompts),
            *(each.families for each in parts if each is not None),
            lambda: nats_server_families(self._nats_server),
            lambda: picker_families(PickerStatistics() if self.picker is None else self.picker.statistics),
            lambda: span_families(None if self._tracing is None else self._tracing.exporter),
        ]
        if self._process is None:
            alone = ProcessState("router", os.getpid(), is_up=True, restarts=0)
            families.append(lambda: process_families([alone], {alone.name: 0}))
        for each in families:
            Projection(self.registry, each)

    async def start(self, stop: asyncio.Event) -> None:
        """Read the log and the fleet, and bind the planes' addresses; raises what `EXPECTED` names."""
        settings = self._settings
        await ensure_streams(self._log, settings.nats)
        if self._journal is not None:
            await ensure_journal(self._log, settings.journal, settings.nats)
        await self.control.start()
        self._rates.restore()
        await self._index.start()
        await self._feeds.start()
        if self._replicas is not None:
            await self._replicas.start()
        await self._feeds.acquainted(stop)
        await self.data.start(settings.data.host, settings.data.port, reuse_port=settings.data.reuse_port)
        self.data_url = url_of(settings.data.host, self.data.port, self.data.scheme)
        self.control_url = url_of(settings.control.host, self.control.port)
        self.log_url = settings.nats.url if self._nats_server is None else self._nats_server.url
        self.picker_address = ""
        if self.picker is not None:
            await self.picker.start()
            self.picker_address = f"{settings.picker.host}:{self.picker.port}"

    def _on_attached(self, line: str, model: str) -> None:
        """Print the line about an attached engine, and after the first one a command that shows prompt reuse."""
        print_lines(f"worker         {line}")
        if not self._is_shown:
            self._is_shown = True
            body = json.dumps({"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": _TRIED}]})
            url = f"{self.data.scheme}://{self._settings.data.host}:{self.data.port}/v1/chat/completions"
            key = "" if self.data.credentials.accounts is None else " -H 'authorization: Bearer KEY'"
            print_lines(f"try it twice   curl -i{key} {url} -d '{body}'")

    def parts(self) -> list[Part]:
        """Return the parts to run; a part stops before those that it depends on."""
        return [
            Part("data-plane", self.data.run, 0, self.data.in_progress),
            Part("credentials", self.data.credentials.run, 1),
            *([] if self.picker is None else [Part("picker", self.picker.run, 0, self.picker.in_progress)]),
            Part("handover", self._handover.run, 0),
            Part("live", self._live.run, 0),
            Part("control-plane", self.control.run, 1),
            Part("admission", self._admission.run, 1),
            Part("feeds", self._feeds.run, 2),
            Part("shadows", self._shadows.run, 2),
            Part("engine-parity", self._parity.run, 2),
            Part("workers", self._attacher.run, 2),
            *([] if self._process and self._process.number else [Part("rates-store", self._rates.run, 2)]),
            Part("loop-lag", LoopLag(self.registry, self._clock).run, 2),
            *([] if self._replicas is None else [Part("replicas", self._replicas.run, 2)]),
            *([] if self._journal is None else [Part("journal", self._journal.run, 2)]),
            *([] if self._tracing is None else [self._tracing.exporter.part(2)]),
            *self._index.parts(3),
            *([] if self._nats_server is None else [Part("nats-server", self._nats_server.run, 4)]),
        ]
