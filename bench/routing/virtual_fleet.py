"""Simulated workers and one real router in virtual time: one process, no sockets, no tasks.

    arrival           the router's own `Routing` decides and books the work, now or once its queue lets the request go
    request is there  at the worker chosen, after the time that a request takes to its engine
    iteration ends    the engine's outputs are there: the ledger gets first tokens and ends; the next iteration begins
    events arrive     `lag_s` later the iteration's changes of the KV cache are folded into the index

Decisions, tokenization and an answer's way back take no time here; workers' heartbeats come on time. At one moment the
ends of iterations come first, then events, a restart, arrivals, and requests at their workers, each in the order in
which they were scheduled; so a run is a function of its arguments.
"""

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest, prompt_tokens
from bench.routing.virtual_router import (
    NO_QUEUE,
    VirtualClock,
    VirtualEngine,
    VirtualIndex,
    VirtualQueue,
    VirtualRouter,
    route_request_of,
)
from indexer.follow.inputs import Received, read_message
from indexer.native.index import NativeIndex
from kv_protocol.codec import encode_message, pack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.events import Batch
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from router.decision.policies import MODES, Mode
from router.decision.policy import Policy
from router.decision.routing import Lease, Routing
from router.decision.state import RouterState
from router.native import built
from worker_agent.engines.simulated.scheduling import TRTLLM, Scheduling
from worker_agent.engines.simulated.timing import H200_8B, EngineTiming
from worker_agent.port.types import EngineDescription, EngineOutput

_END, _LEARN, _RESTART, _ARRIVE, _SUBMIT = range(5)
"""The order of what happens at one moment."""


class VirtualFleetShape(NamedTuple):
    """A fleet: each worker's engine, the blocks in its host memory, and the time that events take to the index.

    All `engines` must have one block size. Worker i has the i-th of `timings`, the first again after the last. At
    `restart_s` the router starts anew: it has the fleet and the index, and knows of no request. Each id of a request's
    blocks stands for `id_tokens` tokens.

    `engines_per_gpu` engines share a GPU: the more of them compute when an iteration begins, the longer it lasts. The
    router takes `router_s` for a request, one after the other. `jitter`: the standard deviation of the logarithm of an
    iteration's length.
    """

    engines: tuple[EngineDescription, ...]
    timings: tuple[EngineTiming, ...] = (H200_8B,)
    lag_s: float = 0.005
    host_blocks: int = 0
    scheduling: Scheduling = TRTLLM
    restart_s: float | None = None
    id_tokens: int = TRACE_BLOCK_TOKENS
    engines_per_gpu: int = 1
    router_s: float = 0.0
    jitter: float = 0.0


class FollowUp(NamedTuple):
    """A request that is sent `after_s` seconds after the answer to another; its arrival time follows from that."""

    after_s: float
    request: TraceRequest


FollowUps = Mapping[tuple[int, ...], Sequence[FollowUp]]
ModesOf = Callable[[Sequence[VirtualEngine]], Mapping[str, Mode]]


class RequestFigures(NamedTuple):
    """One request as its user and its worker saw it. `predicted_tokens` is the overlap that the router counted on.

    `number` is its place in the order of arrival.
    """

    arrival_s: float
    worker: int
    isl_tokens: int
    osl_tokens: int
    cached_tokens: int
    predicted_tokens: int
    ttft_s: float
    e2e_s: float
    number: int = 0

    @property
    def itl_s(self) -> float:
        """The mean time between the answer's tokens; 0 if it has only one."""
        return (self.e2e_s - self.ttft_s) / (self.osl_tokens - 1) if self.osl_tokens > 1 else 0.0


class _InFlight(NamedTuple):
    number: int
    request: TraceRequest
    worker: int
    router: VirtualRouter
    """The router that placed it. A former router still places, after a restart, the requests that waited in it."""
    lease: Lease
    waited_s: float
    predicted_tokens: int


class VirtualFleet:
    """A fleet that plays one trace, once. Each of `requests` must fit into a worker's cache.

    `follow_ups` are found by the block ids of the request that they follow. `modes_of` makes the modes that the policy
    can name, anew for each start of the router, and `new_routing` the part that decides.
    """

    def __init__(
        self,
        shape: VirtualFleetShape,
        policy: Policy,
        requests: Sequence[TraceRequest],
        *,
        seed: int,
        follow_ups: FollowUps = MappingProxyType({}),
        modes_of: ModesOf = lambda _: MODES,
        new_routing: Callable[..., Routing] = Routing,
        queue: VirtualQueue = NO_QUEUE,
    ) -> None:
        self._shape, self._block_size = shape, shape.engines[0].block_size
        self._requests = list(requests)
        self._first = len(requests)
        self._follow_ups = follow_ups
        self._draw, self._router_free_s = random.Random(seed), 0.0  # noqa: S311 - a workload, not a secret
        self._clock = VirtualClock()
        self.engines = [
            VirtualEngine(
                WorkerRank(f"w{number}", 0),
                description,
                shape.timings[number % len(shape.timings)],
                host_blocks=shape.host_blocks,
                id_tokens=shape.id_tokens,
                scheduling=shape.scheduling,
            )
            for number, description in enumerate(shape.engines)
        ]
        self._number_of = {engine.rank.worker_id: number for number, engine in enumerate(self.engines)}
        self.index = VirtualIndex(NativeIndex())
        ranks = [engine.rank for engine in self.engines]
        self.index.begin(ranks)
        self._start: Callable[[], VirtualRouter] = lambda: VirtualRouter(
            ranks,
            shape.engines,
            self.index,
            self._clock,
            policy,
            seed=seed,
            modes=modes_of(self.engines),
            new_routing=new_routing,
            queue=queue,
        )
        self._router = self._start()
        self._in_flight: dict[str, _InFlight] = {}
        self._outcomes: list[RequestFigures] = []
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()

    def run(self) -> list[RequestFigures]:
        """Play all requests; return their figures in the order in which they ended."""
        self._expect(0)
        if self._shape.restart_s is not None:
            self._at(self._shape.restart_s, _RESTART, self._restart)
        while self._agenda:
            self._clock.now_s, _, _, act = heapq.heappop(self._agenda)
            act()
        return self._outcomes

    @property
    def state(self) -> RouterState:
        """The state of the router that runs now."""
        return self._router.state

    def _restart(self) -> None:
        self._router = self._start()

    def _at(self, at_s: float, kind: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, kind, next(self._order), act))

    def _expect(self, number: int) -> None:
        if number < self._first:
            self._at(self._requests[number].arrival_s, _ARRIVE, lambda: self._arrive(number))

    def _follow(self, request: TraceRequest) -> None:
        for follow_up in self._follow_ups.get(request.block_ids, ()):
            self._send(follow_up.request, self._clock.now_s + follow_up.after_s)

    def _send(self, request: TraceRequest, at_s: float) -> None:
        number = len(self._requests)
        self._requests.append(request._replace(arrival_s=at_s))
        self._at(at_s, _ARRIVE, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        if number < self._first:
            self._expect(number + 1)
        self._router_free_s = max(self._clock.now_s, self._router_free_s) + self._shape.router_s
        if self._shape.router_s:
            self._at(self._router_free_s, _ARRIVE, lambda: self._admit(number))
        else:
            self._admit(number)

    def _admit(self, number: int) -> None:
        request, router = self._requests[number], self._router
        size = self._block_size
        hashes = pack_u64(sequence_hashes(prompt_tokens(request, self._shape.id_tokens), size))
        route_request = route_request_of(f"r{number}", request, hashes, size)
        router.admit(route_request, lambda: self._place(router, number, route_request))

    def _place(self, router: VirtualRouter, number: int, route_request: RouteRequest) -> None:
        request, request_id = self._requests[number], route_request.request_id
        verdict, lease = router.place(route_request)
        worker = self._number_of[verdict.winner.worker_id]
        predicted_blocks = min(verdict.overlap_blocks, route_request.reusable_blocks)
        self._in_flight[request_id] = _InFlight(
            number=number,
            request=request,
            worker=worker,
            router=router,
            lease=lease,
            waited_s=self._clock.now_s - request.arrival_s,
            predicted_tokens=predicted_blocks * self._block_size,
        )
        engine = self.engines[worker]
        self._at(
            self._clock.now_s + engine.request_s(request), _SUBMIT, lambda: self._submit(engine, request_id, request)
        )

    def _submit(self, engine: VirtualEngine, request_id: str, request: TraceRequest) -> None:
        engine.submit(request_id, request, self._clock.now_s)
        if engine.ends_s is None:
            self._begin(engine)

    def _begin(self, engine: VirtualEngine) -> None:
        shape, number = self._shape, self._number_of[engine.rank.worker_id]
        gpu = number // shape.engines_per_gpu * shape.engines_per_gpu
        neighbours = sum(each.ends_s is not None for each in self.engines[gpu : gpu + shape.engines_per_gpu])
        factor = math.exp(self._draw.gauss(-(shape.jitter**2) / 2, shape.jitter)) if shape.jitter else 1.0
        engine.begin(self._clock.now_s, neighbours, factor)
        assert engine.ends_s is not None
        self._at(engine.ends_s, _END, lambda: self._end(engine))

    def _end(self, engine: VirtualEngine) -> None:
        outputs, batches = engine.end()
        if batches and not math.isinf(self._shape.lag_s):
            self._at(self._clock.now_s + self._shape.lag_s, _LEARN, lambda: self._learn(engine.rank, batches))
        for request_id, output in outputs:
            self._on_output(request_id, output)
        if engine.simulator.has_work:
            self._begin(engine)

    def _learn(self, rank: WorkerRank, batches: Sequence[Batch]) -> None:
        for batch in batches:
            message = read_message(encode_message([batch]))
            self.index.apply(Received(rank, message), self._clock.now_s)

    def _on_output(self, request_id: str, output: EngineOutput) -> None:
        in_flight = self._in_flight[request_id]
        in_flight.lease.on_bytes()
        if output.finish_reason is not None:
            in_flight.lease.end("ok", built.Answer(in_flight.request.osl_tokens, output.cached_tokens))
            del self._in_flight[request_id]
            self._ended(in_flight, output.cached_tokens)
        in_flight.router.on_progress()

    def _ended(self, in_flight: _InFlight, cached_tokens: int) -> None:
        request = in_flight.request
        self._follow(request)
        assert in_flight.lease.ttft_s is not None
        self._outcomes.append(
            RequestFigures(
                arrival_s=request.arrival_s,
                worker=in_flight.worker,
                isl_tokens=request.isl_tokens,
                osl_tokens=request.osl_tokens,
                cached_tokens=cached_tokens,
                predicted_tokens=in_flight.predicted_tokens,
                ttft_s=in_flight.waited_s + in_flight.lease.ttft_s,
                e2e_s=self._clock.now_s - request.arrival_s,
                number=in_flight.number,
            )
        )
