"""Simulated workers and one real router in virtual time: one process, no sockets, no tasks.

    arrival           the router's own `Routing` decides and promises
    request is there  at the worker chosen, after the time that a request takes to its engine
    iteration ends    the engine's outputs are there: the ledger gets first tokens and ends; the next one begins
    events arrive     what the iteration changed in the KV cache, `lag_s` later, is folded into the index

Decisions, tokenization and an answer's way back take no time here; workers' heartbeats come on time. Of what happens at
one moment the ends of iterations come first, then events, arrivals, and requests at their workers, each in the order in
which they were scheduled; so a run is a function of its arguments.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from bench.routing.tokens import TraceHashes
from bench.routing.trace import TraceRequest
from bench.routing.virtual_engine import EPOCH, FORESEEN_MAX, VirtualEngine
from bench.routing.virtual_worker import MODEL, TEXT, describe, instance_of, registered
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import BatchArrived, HeartbeatArrived
from indexer.index.reference import ReferenceIndex
from kv_protocol.codec import pack_u64
from kv_protocol.events import Batch
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, WorkerHeard
from router.decision.policy import Policy
from router.decision.routing import Lease, Routing
from router.decision.state import RouterState
from router.decision.view import RouteRequest
from router.fleet.ledger import Ledger
from router.fleet.registry import Fleet
from worker_agent.engines.types import EngineDescription, EngineOutput

LEASE_S = 300.0
_END, _LEARN, _ARRIVE, _SUBMIT = range(4)
"""The order of what happens at one moment."""


class VirtualFleetShape(NamedTuple):
    """A fleet: KV tokens a worker, the time that events take to the index, and how much slower than an H200 it is."""

    workers: int
    kv_tokens: int
    block_size: int = 512
    lag_s: float = 0.005
    slowdown: float = 1.0
    foreseen_max: int = FORESEEN_MAX


class FollowUp(NamedTuple):
    """A request that is sent `after_s` seconds after the answer to another; its arrival time follows from that."""

    after_s: float
    request: TraceRequest


class RequestFigures(NamedTuple):
    """One request as its user and its worker saw it. `predicted_tokens` is the overlap that the router counted on."""

    arrival_s: float
    worker: int
    isl_tokens: int
    osl_tokens: int
    cached_tokens: int
    predicted_tokens: int
    ttft_s: float
    e2e_s: float

    @property
    def itl_s(self) -> float:
        """The mean time between the answer's tokens; 0 of an answer of one."""
        return (self.e2e_s - self.ttft_s) / (self.osl_tokens - 1) if self.osl_tokens > 1 else 0.0


class VirtualClock:
    """The time of the run, which its loop sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """Return the seconds since the trace began."""
        return self.now_s

    def wall_ns(self) -> int:
        """Return the same in ns."""
        return round(self.now_s * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Never called: nothing waits in virtual time."""
        raise AssertionError(f"a sleep of {seconds} s in virtual time")


class VirtualIndex(IndexFold):
    """The fold itself, as the router reads it; it has no log to catch up with."""

    def catching_up(self) -> str:
        """Return that there is nothing to wait for."""
        return ""


class _InFlight(NamedTuple):
    request: TraceRequest
    worker: int
    lease: Lease
    predicted_tokens: int


class VirtualFleet:
    """A fleet that plays one trace, once. Each of `requests` fits into a worker's cache.

    `follow_ups` are found by the block ids of the request that they follow.
    """

    def __init__(
        self,
        shape: VirtualFleetShape,
        policy: Policy,
        requests: Sequence[TraceRequest],
        *,
        seed: int,
        follow_ups: Mapping[tuple[int, ...], FollowUp] = MappingProxyType({}),
    ) -> None:
        self._shape = shape
        self._requests = list(requests)
        self._first = len(requests)
        self._follow_ups = follow_ups
        self._clock = VirtualClock()
        self._hashes = TraceHashes(shape.block_size)
        description = describe(
            kv_tokens=shape.kv_tokens,
            block_size=shape.block_size,
            max_seq_len=max(
                each.isl_tokens + each.osl_tokens
                for each in (*requests, *(follow_up.request for follow_up in follow_ups.values()))
            ),
        )
        ranks = [WorkerRank(f"w{number}", 0) for number in range(shape.workers)]
        block_hash, slowdown, foreseen_max = self._hashes.of_engine_block, shape.slowdown, shape.foreseen_max
        self.engines = [
            VirtualEngine(rank, description, block_hash, slowdown=slowdown, foreseen_max=foreseen_max) for rank in ranks
        ]
        self._number_of = {rank.worker_id: number for number, rank in enumerate(ranks)}
        self.index = VirtualIndex(ReferenceIndex())
        self.state = RouterState(Fleet(TEXT), Ledger(LEASE_S))
        self._routing = Routing(
            self.state, self.index, self._clock, policy, seed=seed, lease_s=LEASE_S, decisions_max=1
        )
        self._join(description)
        self._in_flight: dict[str, _InFlight] = {}
        self._outcomes: list[RequestFigures] = []
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()

    def run(self) -> list[RequestFigures]:
        """Return how all requests fared, in the order in which they ended."""
        self._expect(0)
        while self._agenda:
            self._clock.now_s, _, _, act = heapq.heappop(self._agenda)
            act()
        return self._outcomes

    def _join(self, description: EngineDescription) -> None:
        for engine in self.engines:
            joined = registered(engine.rank, description)
            self._routing.apply(FleetApplied(now_s=0.0, event=joined))
            heartbeat = Heartbeat(instance=joined.instance, epoch=EPOCH, last_seq=0)
            self.index.apply(HeartbeatArrived(engine.rank, heartbeat), 0.0)
        self._beat_s = -HEARTBEAT_PERIOD_S

    def _at(self, at_s: float, kind: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, kind, next(self._order), act))

    def _expect(self, number: int) -> None:
        if number < self._first:
            self._at(self._requests[number].arrival_s, _ARRIVE, lambda: self._arrive(number))

    def _follow(self, request: TraceRequest) -> None:
        follow_up = self._follow_ups.get(request.block_ids)
        if follow_up is not None:
            number, at_s = len(self._requests), self._clock.now_s + follow_up.after_s
            self._requests.append(follow_up.request._replace(arrival_s=at_s))
            self._at(at_s, _ARRIVE, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        if number < self._first:
            self._expect(number + 1)
        self._beat()
        request, request_id = self._requests[number], f"r{number}"
        route_request = self._route_request(request_id, request)
        verdict = self._routing.decide(route_request)
        lease = self._routing.take(verdict)
        worker = self._number_of[verdict.winner.worker_id]
        predicted_blocks = min(verdict.overlap_blocks, route_request.reusable_blocks)
        self._in_flight[request_id] = _InFlight(request, worker, lease, predicted_blocks * self._shape.block_size)
        engine = self.engines[worker]
        self._at(
            self._clock.now_s + engine.request_s(request), _SUBMIT, lambda: self._submit(engine, request_id, request)
        )

    def _submit(self, engine: VirtualEngine, request_id: str, request: TraceRequest) -> None:
        ended_s = engine.ends_s
        engine.submit(request_id, request, self._clock.now_s)
        if ended_s is None:
            engine.begin(self._clock.now_s)
        if engine.ends_s != ended_s:
            self._await(engine)

    def _route_request(self, request_id: str, request: TraceRequest) -> RouteRequest:
        return RouteRequest(
            decision_id=request_id,
            request_id=request_id,
            model=MODEL,
            isl_tokens=request.isl_tokens,
            block_size=self._shape.block_size,
            sequence_hashes=pack_u64(self._hashes.of_prompt(request)),
            max_tokens=request.osl_tokens,
        )

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

    def _await(self, engine: VirtualEngine) -> None:
        assert engine.ends_s is not None
        self._at(engine.ends_s, _END, lambda: self._end(engine))

    def _end(self, engine: VirtualEngine) -> None:
        if engine.ends_s != self._clock.now_s:
            return  # it was cut off before
        outputs, batches = engine.end()
        if batches and not math.isinf(self._shape.lag_s):
            self._at(self._clock.now_s + self._shape.lag_s, _LEARN, lambda: self._learn(engine.rank, batches))
        for request_id, output in outputs:
            self._on_output(request_id, output)
        if engine.has_work:
            engine.begin(self._clock.now_s)
            self._await(engine)

    def _learn(self, rank: WorkerRank, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.index.apply(BatchArrived(rank, batch), self._clock.now_s)

    def _on_output(self, request_id: str, output: EngineOutput) -> None:
        in_flight = self._in_flight[request_id]
        in_flight.lease.on_bytes()
        if output.finish_reason is None:
            return
        in_flight.lease.end("ok", output.cached_tokens, in_flight.request.osl_tokens)
        del self._in_flight[request_id]
        request = in_flight.request
        self._follow(request)
        assert in_flight.lease.ttft_s is not None
        self._outcomes.append(
            RequestFigures(
                arrival_s=request.arrival_s,
                worker=in_flight.worker,
                isl_tokens=request.isl_tokens,
                osl_tokens=request.osl_tokens,
                cached_tokens=output.cached_tokens,
                predicted_tokens=in_flight.predicted_tokens,
                ttft_s=in_flight.lease.ttft_s,
                e2e_s=self._clock.now_s - request.arrival_s,
            )
        )
