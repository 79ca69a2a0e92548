"""One life of a router: the production state, decisions and leases, between an index and workers' endpoints.

A request is routed, forwarded, tried again elsewhere where a worker fails before its first byte, and settled; its
client may go away at any time. Whatever became of it, its lease ends.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kv_protocol import fleet, load
from kv_protocol.codec import pack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.errors import MalformedMessage
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    AttemptEnded,
    AttemptOutcome,
    FleetApplied,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    OutcomeName,
    WorkerHeard,
)
from kv_protocol.ledger import Expired
from router.decision.eligibility import NoEligibleWorker
from router.decision.policy import Policy
from router.decision.routing import Lease, Routing
from router.decision.state import RouterState, StateSettings
from router.decision.verdict import Verdict
from router.fleet.breakers import BreakerLimits
from router.native import built
from tests.simulation.calls import Call, Caller
from tests.simulation.index import Index
from tests.simulation.oracle import BLOCK_SIZE
from tests.simulation.setup import DIGESTS, MODEL, RouterSetup
from worker_agent.port.types import EngineOutput, EngineRequest

RETRY_LIMIT = 2
BREAKER_S = 2.0
DECISIONS_MAX = 64

Forward = Callable[[str, WorkerRank, EngineRequest, Caller], Call]
"""Send a request of the router named first to a rank."""
Finished = Callable[[EngineRequest, tuple[int, ...]], None]
"""A client has its whole answer: the request, and the tokens of it and of the answer."""


class Router:
    """Routes from its making until `kill`. `index` is its own."""

    def __init__(self, index: Index, setup: RouterSetup, seed: int, forward: Forward, finished: Finished) -> None:
        self.index, self._forward, self.finished, self.is_alive = index, forward, finished, True
        self.clock = index.clock
        breakers = BreakerLimits(open_s=BREAKER_S, open_s_max=2 * BREAKER_S)
        self.state = RouterState(StateSettings(text=DIGESTS, lease_s=setup.lease_s, breakers=breakers))
        self.routing = Routing(
            self.state,
            index,
            self.clock,
            Policy(temperature=setup.temperature, predict_on_route=setup.predict_on_route),
            seed=seed,
            lease_s=setup.lease_s,
            decisions_max=DECISIONS_MAX,
        )
        self.outcomes: Counter[str] = Counter()
        self.reports = 0
        self.running: dict[str, RoutedRequest] = {}
        self._was_connected = True
        index.on_fleet = self._on_fleet_event
        index.connection.listen("heartbeat", self._on_pulse)
        index.connection.listen("load", self._on_load)

    @property
    def name(self) -> str:
        """The process."""
        return self.index.name

    def kill(self) -> None:
        """Nothing of this life is heard any more; its connections are closed."""
        self.is_alive = False
        self.index.kill()
        for request in self.running.values():
            request.abandon()
        self.running.clear()

    def tick(self) -> None:
        """Time has passed."""
        self.index.tick()
        now_s, is_connected = self.clock.now(), self.index.connection.is_connected
        if is_connected != self._was_connected:
            self._was_connected = is_connected
            self.routing.apply(LogConnection(now_s=now_s, heard=is_connected))
        for record in self.routing.tick():
            if isinstance(record, LedgerApplied) and isinstance(record.event, Expired):
                self.outcomes["expired"] += 1

    # -------------------------------------------------------------- what it hears
    def _on_fleet_event(self, data: bytes) -> None:
        try:
            event = fleet.decode_fleet_event(data)
        except MalformedMessage:
            return
        self.routing.apply(FleetApplied(now_s=self.clock.now(), event=event))

    def _on_pulse(self, rank: WorkerRank, data: bytes, _: str) -> None:
        try:
            heartbeat = fleet.decode_heartbeat(data)
        except MalformedMessage:
            return
        heard = WorkerHeard(now_s=self.clock.now(), worker_id=rank.worker_id, instance=heartbeat.instance)
        self.routing.apply(heard)

    def _on_load(self, rank: WorkerRank, data: bytes, _: str) -> None:
        try:
            report = load.decode_load(data)
        except MalformedMessage:
            return
        self.reports += 1
        now_s = self.clock.now()
        self.routing.apply(LoadApplied(now_s=now_s, worker_id=rank.worker_id, dp_rank=rank.dp_rank, report=report))

    # -------------------------------------------------------------- what it does
    def route(self, request: EngineRequest) -> None:
        """A client asks; its connection is closed by `leave`."""
        routed = self.running[request.request_id] = RoutedRequest(self, request)
        routed.attempt()

    def leave(self, request_id: str) -> None:
        """The client has gone."""
        if request_id in self.running:
            self.running[request_id].leave()

    def decide(self, request: EngineRequest, decision_id: str, tried: Sequence[WorkerRank] = ()) -> Verdict:
        """Return where the request is routed to; raises `NoEligibleWorker`."""
        route = RouteRequest(
            decision_id=decision_id,
            request_id=request.request_id,
            model=MODEL,
            isl_tokens=len(request.prompt),
            block_size=BLOCK_SIZE,
            sequence_hashes=pack_u64(sequence_hashes(request.prompt, BLOCK_SIZE, cache_salt=request.cache_salt)),
            max_tokens=request.max_tokens,
            tried=tuple(tried),
        )
        return self.routing.decide(route)

    def attempted(self, rank: WorkerRank, decision_id: str, outcome: AttemptOutcome, phase: str = "") -> None:
        """An attempt at a rank ended so."""
        ended = AttemptEnded(
            now_s=self.clock.now(),
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            outcome=outcome,
            phase=phase,
            decision_id=decision_id,
        )
        self.routing.apply(ended)

    def forward(self, rank: WorkerRank, request: EngineRequest, caller: Caller) -> Call:
        """Send a request on."""
        return self._forward(self.name, rank, request, caller)


class RoutedRequest:
    """One client's request at a router, and the call that is made for it now."""

    def __init__(self, router: Router, request: EngineRequest) -> None:
        self._router, self._request = router, request
        self._answer: list[int] = []
        self._tried: list[WorkerRank] = []
        self._call: Call | None = None
        self._lease: Lease | None = None
        self._decision_id = ""

    def attempt(self) -> None:
        """Route it, and send it on."""
        decision_id = self._decision_id = f"{self._request.request_id}-{len(self._tried)}"
        try:
            verdict = self._router.decide(self._request, decision_id, self._tried)
        except NoEligibleWorker:
            self._finish("no_worker")
            return
        self._lease = self._router.routing.take(verdict)
        rank = verdict.winner
        self._tried.append(rank)
        asked = msgspec.structs.replace(self._request, request_id=decision_id, dp_rank=rank.dp_rank)
        self._call = self._router.forward(rank, asked, self)

    def leave(self) -> None:
        """The client has gone."""
        self.abandon()
        self._attempted("cancelled")
        self._settle("cancelled")

    def abandon(self) -> None:
        """The worker's connection is closed."""
        if self._call is not None:
            self._call.close()

    def on_output(self, output: EngineOutput) -> None:
        """Bytes of the answer came."""
        assert self._lease is not None
        self._answer += output.token_ids
        self._lease.on_bytes()
        if output.finish_reason is not None:
            self._router.finished(self._request, (*self._request.prompt, *self._answer))
            self._attempted("ok")
            self._settle("ok", output.cached_tokens)

    def on_refused(self) -> None:
        """The worker will not compute it."""
        self._attempted("client_fault")
        self._settle("refused")

    def on_failure(self, phase: str) -> None:
        """The worker failed."""
        assert self._lease is not None
        self._lease.end("failed")
        self._attempted("failed", phase)
        if self._answer or len(self._tried) > RETRY_LIMIT:
            self._finish("failed")
        else:
            self.attempt()

    def _attempted(self, outcome: AttemptOutcome, phase: str = "") -> None:
        self._router.attempted(self._tried[-1], self._decision_id, outcome, phase)

    def _settle(self, outcome: OutcomeName, cached_tokens: int | None = None) -> None:
        assert self._lease is not None
        self._lease.end(outcome, built.Answer(cached_tokens=cached_tokens))
        self._finish(outcome)

    def _finish(self, outcome: str) -> None:
        self._router.outcomes[outcome] += 1
        self._router.running.pop(self._request.request_id, None)
