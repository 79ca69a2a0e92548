"""The router of a virtual fleet: its own decisions on the run's clock and index. Heartbeats of workers come on time."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bench.routing.trace import TraceRequest
from bench.routing.virtual_engine import EPOCH, MODEL, TEXT, instance_of, registered
from indexer.follow.fold import IndexFold
from indexer.follow.inputs import HeartbeatArrived
from kv_protocol.decided import RouteRequest
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, WorkerHeard
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.routing import Lease, Routing
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.decision.verdict import Verdict
from router.http.refusals import Refusal
from router.queue.gate import Admission, FleetHeadroom
from router.queue.waiting import QueueLimits, QueuePolicy
from worker_agent.port.types import EngineDescription

LEASE_S = 300.0


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

    async def wait(self, _event: asyncio.Event, seconds: float) -> None:
        """Never called, as `sleep`."""
        await self.sleep(seconds)


class VirtualIndex(IndexFold):
    """The fold itself, as the router reads it; it has no log to catch up with."""

    def begin(self, ranks: Sequence[WorkerRank]) -> None:
        """The stream of each rank begins now, with nothing held."""
        for rank in ranks:
            heartbeat = Heartbeat(instance=instance_of(rank.worker_id), epoch=EPOCH, last_seq=0)
            self.apply(HeartbeatArrived(rank, heartbeat), 0.0)

    def catching_up(self) -> str:
        """Return that there is nothing to wait for."""
        return ""


class VirtualQueue(NamedTuple):
    """The router's queue (`router/queue/admission.py`) without a bound; threshold None: no request waits."""

    threshold: float | None = None
    policy: QueuePolicy = "fcfs"

    @property
    def title(self) -> str:
        """What policies with this queue have in common."""
        return "no queue" if self.threshold is None else f"queue {self.policy}"


NO_QUEUE = VirtualQueue()


class VirtualRouter:
    """One life of a router, which begins now: it knows the fleet and the index, and of no request."""

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
        limits = QueueLimits(policy=queue.policy, wait_s=math.inf, requests_max=1 << 62, tokens_max=1 << 62)
        self._admission = Admission(clock, FleetHeadroom(self._routing, queue.threshold), limits)

    def admit(self, request: RouteRequest, admitted: Callable[[], None]) -> None:
        """Call `admitted`, which is to `place` the request: now, or from `on_progress` if it has to wait."""
        self._beat()
        if self._admission.admits(request):
            admitted()
        else:
            self._admission.wait(request, partial(_told, admitted))

    def on_progress(self) -> None:
        """Tokens came: requests that fit now are admitted."""
        if len(self._admission.queue):
            self._beat()
            self._admission.poke()

    def place(self, request: RouteRequest) -> tuple[Verdict, Lease]:
        """Decide and promise."""
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


def _told(admitted: Callable[[], None], refusal: Refusal | None) -> None:
    assert refusal is None, "the queue has no bound"
    admitted()


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
