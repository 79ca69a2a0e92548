"""A worker of a virtual fleet, with its engine and its agent's rules and mirror; and the router of the fleet.

The router uses the run's clock and index; heartbeats of workers come on time.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import NamedTuple

import msgspec

from bench.routing.trace import TRACE_BLOCK_TOKENS, OneToken, TraceRequest, prompt_tokens
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import Received
from kv_protocol.decided import RouteRequest
from kv_protocol.events import Batch
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, WorkerHeard
from kv_runtime.clock import Clock
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.routing import Lease, Routing
from router.decision.state import RouterState, StateSettings
from router.decision.verdict import Verdict
from router.fleet.registry import TextDigests
from router.queue.config import QueuePolicy, QueueSection
from router.queue.gate import Admission
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.scheduling import Scheduling
from worker_agent.engines.simulated.timing import EngineTiming
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.mirror import RankMirror
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest

_ONE_TOKEN = OneToken()


def scaled(timing: EngineTiming, factor: float) -> EngineTiming:
    """Return the timing of an engine that needs `factor` times as long for everything."""
    seconds = {name: getattr(timing, name) * factor for name in timing.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(timing, **seconds)


class VirtualEngine:
    """One worker, busy or idle. `begin`, wait until `ends_s`, `end`; repeat while its simulator has work."""

    def __init__(
        self,
        rank: WorkerRank,
        description: EngineDescription,
        timing: EngineTiming,
        *,
        host_blocks: int,
        id_tokens: int,
        scheduling: Scheduling,
    ) -> None:
        """Each id of a request's blocks stands for `id_tokens` tokens."""
        self.rank = rank
        self._timing, self._id_tokens = timing, id_tokens
        self.simulator = Simulator(
            description,
            timing=timing,
            scheduling=scheduling,
            token_source=_ONE_TOKEN,
            host_blocks=host_blocks,
        )
        self._rules, self._mirror = TrtllmRules(description.block_size), RankMirror(description.block_size)
        self._numbers = count(1)
        self._outputs: tuple[tuple[str, EngineOutput], ...] = ()
        self.waiting_requests = 0
        """Requests that wait for their first iteration, as of the newest iteration, like the engine's metrics."""
        self.ends_s: float | None = None
        """When what is being computed ends; None while the engine is idle."""

    def request_s(self, request: TraceRequest) -> float:
        """Return how long a request is on its way to this engine."""
        return self._timing.request_s(request.isl_tokens)

    def submit(self, request_id: str, request: TraceRequest, now_s: float) -> None:
        """Queue a request; the next iteration that begins may schedule it."""
        engine_request = EngineRequest(
            request_id=request_id, prompt=prompt_tokens(request, self._id_tokens), max_tokens=request.osl_tokens
        )
        self.simulator.submit(engine_request, now_s)
        self.waiting_requests += 1

    def begin(self, now_s: float, neighbours: int = 0, factor: float = 1.0) -> None:
        """Begin an iteration; `ends_s` says when it ends.

        `neighbours` compute on the same GPU; one iteration lasts `factor` times as long as the engine model says.
        """
        step = self.simulator.step(now_s, neighbours)
        self._outputs, self.ends_s = step.outputs, now_s + step.duration_s * factor
        self.waiting_requests = step.statistics[0]["inflightBatchingStats"]["numQueuedContextRequests"]

    def end(self) -> tuple[tuple[tuple[str, EngineOutput], ...], list[Batch]]:
        """End the iteration; return the outputs by request id, and the batches that it publishes."""
        self.ends_s = None
        self.simulator.flush_events()
        changes = [self._mirror.apply(each.event) for each in self._rules.translate(self.simulator.drain_events())]
        return self._outputs, [Batch(EPOCH, next(self._numbers), change) for change in chain.from_iterable(changes)]


EPOCH = 1
MODEL = "sim-8b"
TEXT = TextDigests("trace", "trace")
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
MAX_SEQ_LEN = 1 << 22


def instance_of(worker_id: str) -> str:
    """Return the name of the worker's only instance."""
    return f"{worker_id}-1"


def describe(kv_tokens: int, block_size: int = TRACE_BLOCK_TOKENS) -> EngineDescription:
    """Return an engine with a KV cache of `kv_tokens` in blocks of `block_size`; a request may fill the cache."""
    return EngineDescription(
        model=MODEL,
        version="virtual",
        event_source="simulated",
        block_size=block_size,
        total_kv_blocks=kv_tokens // block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_seq_len=MAX_SEQ_LEN,
    )


def registered(rank: WorkerRank, description: EngineDescription) -> WorkerRegistered:
    """Return the fleet event by which the worker with this one rank joins."""
    return WorkerRegistered(
        worker_id=rank.worker_id,
        instance=instance_of(rank.worker_id),
        model=MODEL,
        served_names=(MODEL,),
        base_url="http://virtual",
        block_size=description.block_size,
        hash_scheme=HASH_SCHEME,
        tokenizer_digest=TEXT.tokenizer,
        template_digest=TEXT.template,
        canary=canary(description.block_size),
        total_kv_blocks=description.total_kv_blocks,
        max_num_seqs=description.max_num_seqs,
        max_num_batched_tokens=description.max_num_batched_tokens,
        max_seq_len=description.max_seq_len,
        event_source="simulated",
    )


LEASE_S = 300.0


class VirtualClock(Clock):
    """The time of the run, which its loop sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """Return the seconds since the trace began."""
        return self.now_s

    def wall_ns(self) -> int:
        """Return `now` in ns."""
        return round(self.now_s * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Never called: nothing waits in virtual time."""
        raise AssertionError(f"a sleep of {seconds} s in virtual time")

    async def wait(self, _event: asyncio.Event, seconds: float) -> None:
        """Never called, as `sleep`."""
        await self.sleep(seconds)


class VirtualIndex(IndexFold):
    """The index's fold, as the router reads it; it has no log to catch up with."""

    def begin(self, ranks: Sequence[WorkerRank]) -> None:
        """Begin the stream of each rank, which holds no block yet."""
        for rank in ranks:
            heartbeat = Heartbeat(instance=instance_of(rank.worker_id), epoch=EPOCH, last_seq=0)
            self.apply(Received(rank, heartbeat), 0.0)

    def catching_up(self) -> str:
        """Return the empty text: there is nothing to wait for."""
        return ""


class VirtualQueue(NamedTuple):
    """The router's queue (`router/queue/waiting.py`) without a bound; threshold None: no request waits."""

    threshold: float | None = None
    policy: QueuePolicy = "fcfs"

    @property
    def title(self) -> str:
        """The title in tables of the policies with this queue."""
        return "no queue" if self.threshold is None else f"queue {self.policy}"


NO_QUEUE = VirtualQueue()


class _Unbounded(QueueSection):
    """A queue without a bound, which settings do not allow."""

    tokens_max = 1 << 62


class VirtualRouter:
    """One life of a router, which begins now: it knows the fleet and the index, and no request."""

    def __init__(
        self,
        ranks: Sequence[WorkerRank],
        descriptions: Sequence[EngineDescription],
        index: VirtualIndex,
        clock: VirtualClock,
        policy: Policy,
        *,
        seed: int,
        modes: Mapping[str, Mode],
        new_routing: Callable[..., Routing] = Routing,
        queue: VirtualQueue = NO_QUEUE,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self.state = RouterState(StateSettings(text=TEXT, lease_s=LEASE_S), modes)
        self._routing = new_routing(self.state, index, clock, policy, seed=seed, lease_s=LEASE_S, decisions_max=1)
        for rank, description in zip(ranks, descriptions, strict=True):
            self._routing.apply(FleetApplied(now_s=clock.now_s, event=registered(rank, description)))
        self._beat_s = clock.now_s - HEARTBEAT_PERIOD_S
        limits = _Unbounded.model_construct(
            threshold=queue.threshold, policy=queue.policy, wait_s=math.inf, requests_max=1 << 62
        )
        self._admission = Admission(self._routing, limits)

    def admit(self, request: RouteRequest, admitted: Callable[[], None]) -> None:
        """Call `admitted`, which is to `place` the request: now, or from `on_progress` if it has to wait."""
        self._beat()
        if self._admission.admits(request):
            admitted()
        else:
            self._admission.wait(request, lambda _: admitted())  # never refused: the queue has no bound

    def on_progress(self) -> None:
        """Admit the requests that fit now that tokens came."""
        if len(self._admission.queue):
            self._beat()
            self._admission.poke()

    def place(self, request: RouteRequest) -> tuple[Verdict, Lease]:
        """Decide; return the verdict, and the lease that it begins."""
        self._beat()
        verdict = self._routing.decide(request)
        return verdict, self._routing.take(verdict)

    def _beat(self) -> None:
        """Once a second: apply heartbeats and advance the ledger's time."""
        now_s = self._clock.now_s
        if now_s - self._beat_s < HEARTBEAT_PERIOD_S:
            return
        self._beat_s = now_s
        for rank in self._ranks:
            heard = WorkerHeard(now_s=now_s, worker_id=rank.worker_id, instance=instance_of(rank.worker_id))
            self._routing.apply(heard)
        self._routing.tick()


def route_request_of(request_id: str, request: TraceRequest, sequence_hashes: bytes, block_size: int) -> RouteRequest:
    """Return what the router reads of a request of a trace."""
    return RouteRequest(
        decision_id=request_id,
        request_id=request_id,
        model=MODEL,
        isl_tokens=request.isl_tokens,
        block_size=block_size,
        sequence_hashes=sequence_hashes,
        max_tokens=request.osl_tokens if request.limit_tokens is None else request.limit_tokens,
        session_id=request.session,
    )
