"""A layout of simulated workers, KV on its way between them, and one real router in virtual time.

    transfer ends     sender and receiver may have work again
    iteration ends    its outputs are processed (`journey.py`); the next one begins, with what it fetches
    events arrive     what the iteration changed in the KV cache, `LAG_S` later, is folded into the index
    arrival           the request's plan, and a decision
    request is there  at the worker chosen, after the time that a request takes to its engine; again in every phase

Decisions, tokenization and answers' ways back take no time; nothing limits how long a request waits. What happens at
one moment happens in the order of the table, else in that of scheduling; so a run is a function of its arguments.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from bench.disagg.engine import RoleEngine
from bench.disagg.journey import Journey, JourneyAnswer, Router
from bench.disagg.layouts import Layout
from bench.routing.canonical_stream import EPOCH
from bench.routing.tokens import TraceHashes
from bench.routing.trace import TraceRequest
from bench.routing.virtual_engine import FORESEEN_MAX
from bench.routing.virtual_router import LEASE_S, VirtualClock, VirtualIndex
from bench.routing.virtual_worker import MODEL, TEXT, describe, instance_of, registered
from indexer.follow.inputs import BatchArrived, HeartbeatArrived
from indexer.native.index import NativeIndex
from kv_protocol.codec import pack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.events import Batch
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, WorkerHeard
from router.decision.disaggregation import ConditionalLimits
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from worker_agent.engines.simulated.exchange import TransferExchange
from worker_agent.engines.simulated.transfer import TransferRules, TransferStatistics
from worker_agent.port.types import EngineDescription, EngineOutput

LAG_S = 0.005
"""From an engine's flush to the index."""
_END, _LEARN, _ARRIVE, _SUBMIT = range(4)


class DisaggSetting(NamedTuple):
    """What all layouts have in common: a worker's cache, the network, the router's policy and its bounds."""

    kv_tokens: int = 700_000
    block_size: int = 512
    transfers: TransferRules = TransferRules()
    policy: Policy = Policy.current()
    limits: ConditionalLimits = ConditionalLimits()
    """Its policy is the layout's."""
    seed: int = 1
    foreseen_max: int = FORESEEN_MAX


class DisaggRun(NamedTuple):
    """The outcomes of all requests, in the order in which they ended, and of each worker's transfers."""

    answers: list[JourneyAnswer]
    failed: int
    span_s: float
    """From the first arrival to the last end."""
    transfers: list[TransferStatistics]


class DisaggFleet:
    """A layout that plays one trace, once. Each of `requests` fits into a worker's cache."""

    def __init__(self, layout: Layout, setting: DisaggSetting, requests: Sequence[TraceRequest]) -> None:
        self._setting, self._requests = setting, requests
        self._clock, self._hashes = VirtualClock(), TraceHashes(setting.block_size)
        self.index = VirtualIndex(NativeIndex())
        self.state = RouterState(StateSettings(text=TEXT, lease_s=LEASE_S))
        self._routing = Routing(
            self.state, self.index, self._clock, setting.policy, seed=setting.seed, lease_s=LEASE_S, decisions_max=1
        )
        limits, names = setting.limits._replace(policy=layout.conditional), count()
        self._router = Router(self._routing, limits, lambda: f"d{next(names)}")
        self.exchange = TransferExchange()
        self.engines = self._joined(layout)
        self._number_of = {engine.rank.worker_id: number for number, engine in enumerate(self.engines)}
        self._beat_s = -HEARTBEAT_PERIOD_S
        self._carry_s: float | None = None
        self._in_flight: dict[str, Journey] = {}
        self._answers: list[JourneyAnswer] = []
        self._failed, self._ended_s = 0, 0.0
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()

    def _joined(self, layout: Layout) -> list[RoleEngine]:
        setting = self._setting
        seq_len_max = max(each.isl_tokens + each.osl_tokens for each in self._requests)
        description = describe(kv_tokens=setting.kv_tokens, block_size=setting.block_size, max_seq_len=seq_len_max)
        transfers = replace(setting.transfers, buffer_tokens=layout.buffer_tokens)
        engines = []
        for number, role in enumerate(layout.roles):
            rank = WorkerRank(f"w{number}", 0)
            engine = RoleEngine(
                rank,
                description,
                self._hashes.of_engine_block,
                role=role,
                transfers=transfers,
                foreseen_max=setting.foreseen_max,
            )
            self.exchange.join(rank.worker_id, engine.simulator)
            self._register(engine, description)
            engines.append(engine)
        return engines

    def _register(self, engine: RoleEngine, description: EngineDescription) -> None:
        joined = replace(registered(engine.rank, description), role=engine.role)
        self._routing.apply(FleetApplied(now_s=0.0, event=joined))
        heartbeat = Heartbeat(instance=joined.instance, epoch=EPOCH, last_seq=0)
        self.index.apply(HeartbeatArrived(engine.rank, heartbeat), 0.0)

    # ------------------------------------------------------------------------------------------- time

    def run(self) -> DisaggRun:
        """Play the trace and return the outcomes of all requests."""
        self._expect(0)
        while self._agenda or self._carry_s is not None:
            if self._carry_s is not None and (not self._agenda or self._carry_s <= self._agenda[0][0]):
                self._clock.now_s = self._carry_s
                self._carry()
            else:
                self._clock.now_s, _, _, act = heapq.heappop(self._agenda)
                act()
        span_s = self._ended_s - self._requests[0].arrival_s
        return DisaggRun(
            self._answers, self._failed, span_s, [each.simulator.transfer_statistics() for each in self.engines]
        )

    def _at(self, at_s: float, kind: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, kind, next(self._order), act))

    def _beat(self) -> None:
        """Once a second: apply heartbeats and advance the ledger's time."""
        now_s = self._clock.now_s
        if now_s - self._beat_s < HEARTBEAT_PERIOD_S:
            return
        self._beat_s = now_s
        for engine in self.engines:
            worker_id = engine.rank.worker_id
            self._routing.apply(WorkerHeard(now_s=now_s, worker_id=worker_id, instance=instance_of(worker_id)))
        self._routing.tick()

    # ------------------------------------------------------------------------------------------- requests

    def _expect(self, number: int) -> None:
        if number < len(self._requests):
            self._at(self._requests[number].arrival_s, _ARRIVE, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        self._expect(number + 1)
        self._beat()
        request = self._requests[number]
        self._decide(Journey(self._router, request, self._route_request(f"r{number}", request)))

    def _route_request(self, request_id: str, request: TraceRequest) -> RouteRequest:
        return RouteRequest(
            decision_id=request_id,
            request_id=request_id,
            model=MODEL,
            isl_tokens=request.isl_tokens,
            block_size=self._setting.block_size,
            sequence_hashes=pack_u64(self._hashes.of_prompt(request)),
            max_tokens=request.osl_tokens,
        )

    def _decide(self, journey: Journey) -> None:
        self._beat()
        if not journey.decide():
            self._fail()
            return
        engine = self.engines[self._number_of[journey.rank.worker_id]]
        self._in_flight[journey.route.decision_id] = journey
        at_s = self._clock.now_s + engine.request_s(journey.request)
        self._at(at_s, _SUBMIT, lambda: self._submit(engine, journey))

    def _submit(self, engine: RoleEngine, journey: Journey) -> None:
        route, ended_s = journey.route, engine.ends_s
        handoff = journey.handoff if route.phase == "decode" else None
        engine.submit(route.decision_id, journey.request, self._clock.now_s, phase=route.phase, handoff=handoff)
        self._resume(engine, ended_s)

    def _on_output(self, decision_id: str, output: EngineOutput) -> None:
        journey = self._in_flight[decision_id]
        following = journey.on_output(output)
        if following == "wait":
            return
        del self._in_flight[decision_id]
        if following == "decide":
            self._decide(journey)
        elif following == "again":
            self._at(self._clock.now_s + journey.pause_s, _ARRIVE, lambda: self._decide(journey))
        elif following == "failed":
            self._fail()
        else:
            worker, self._ended_s = self._number_of[journey.rank.worker_id], self._clock.now_s
            self._answers.append(journey.answer(worker, self._ended_s))

    def _fail(self) -> None:
        self._failed, self._ended_s = self._failed + 1, self._clock.now_s

    # ------------------------------------------------------------------------------------------- engines

    def _begin(self, engine: RoleEngine) -> None:
        engine.begin(self._clock.now_s)
        if engine.fetches:
            self.exchange.begin(engine.rank.worker_id, engine.fetches, self._clock.now_s)
        if engine.role != "aggregated":
            self._carry_s = self.exchange.next_s
        self._await(engine)

    def _resume(self, engine: RoleEngine, ended_s: float | None) -> None:
        """Reschedule an engine after new work; its iterations were to end at `ended_s`."""
        if ended_s is None:
            if engine.has_work:
                self._begin(engine)
        elif engine.ends_s != ended_s:
            self._await(engine)

    def _await(self, engine: RoleEngine) -> None:
        assert engine.ends_s is not None
        self._at(engine.ends_s, _END, lambda: self._end(engine))

    def _end(self, engine: RoleEngine) -> None:
        if engine.ends_s != self._clock.now_s:
            return  # it was cut off before
        outputs, batches = engine.end()
        if batches:
            self._at(self._clock.now_s + LAG_S, _LEARN, lambda: self._learn(engine.rank, batches))
        for decision_id, output in outputs:
            self._on_output(decision_id, output)
        if engine.has_work:
            self._begin(engine)

    def _learn(self, rank: WorkerRank, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.index.apply(BatchArrived(rank, batch), self._clock.now_s)

    def _carry(self) -> None:
        touched = self.exchange.advance(self._clock.now_s)
        for engine in self.engines:
            if engine.rank.worker_id in touched:
                ended_s = engine.ends_s
                engine.cut(self._clock.now_s)
                self._resume(engine, ended_s)
        self._carry_s = self.exchange.next_s
