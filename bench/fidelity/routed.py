"""Placements by the router itself, in a closed loop: its own decisions, ledger and index, on the run's clock.

What an iteration changed in a cache is folded into the index `LAG_S` later. Decisions take no time.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.fidelity.closed_loop import Placer, Sent
from bench.placement.policies import Placement
from bench.routing.canonical_stream import CanonicalStream
from bench.routing.trace import TraceRequest
from bench.routing.virtual_router import VirtualClock, VirtualIndex, VirtualRouter, route_request_of
from indexer.follow.inputs import BatchArrived
from indexer.native.index import NativeIndex
from kv_protocol.codec import pack_u64
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from router.native import built
from worker_agent.engines.simulated.events import EngineEvent
from worker_agent.port.types import EngineDescription, EngineOutput

if TYPE_CHECKING:
    from router.decision.routing import Lease

LAG_S = 0.005
"""As in the virtual fleet."""


class _Due(NamedTuple):
    at_s: float
    arrived: BatchArrived


class Routed(Placer):
    """One life of a router before `workers` engines of one description; equal seeds, equal choices."""

    def __init__(self, placement: Placement, description: EngineDescription, workers: int, seed: int) -> None:
        self._clock, self._index = VirtualClock(), VirtualIndex(NativeIndex())
        self._ranks = [WorkerRank(f"w{number}", 0) for number in range(workers)]
        self._index.begin(self._ranks)
        self._block_size = description.block_size
        self._router = VirtualRouter(
            self._ranks,
            [description] * workers,
            self._index,
            self._clock,
            placement.policy,
            seed=seed,
            modes=placement.modes_of(()),
        )
        self._streams = [CanonicalStream(description.block_size) for _ in self._ranks]
        self._due: deque[_Due] = deque()
        self._leases: dict[str, Lease] = {}

    def choose(self, sent: Sent) -> int:
        """Return the worker that the router decides for."""
        self._clock.now_s = sent.at_s
        while self._due and self._due[0].at_s <= sent.at_s:
            due = self._due.popleft()
            self._index.apply(due.arrived, due.at_s)
        request = sent.request
        hashes = pack_u64(sequence_hashes(request.prompt, self._block_size))
        shape = TraceRequest(sent.at_s, len(request.prompt), request.max_tokens, ())
        verdict, lease = self._router.place(route_request_of(request.request_id, shape, hashes, self._block_size))
        self._leases[request.request_id] = lease
        return next(number for number, rank in enumerate(self._ranks) if rank.worker_id == verdict.winner.worker_id)

    def on_output(self, request_id: str, output: EngineOutput, now_s: float, answer_tokens: int) -> None:
        """Let the ledger learn of first tokens and ends."""
        self._clock.now_s = now_s
        lease = self._leases[request_id]
        lease.on_bytes()
        if output.finish_reason is not None:
            lease.end("ok", built.Answer(answer_tokens, output.cached_tokens))
            del self._leases[request_id]

    def on_events(self, worker: int, events: Sequence[EngineEvent], now_s: float) -> None:
        """Fold the events into the index after the lag."""
        rank, stream = self._ranks[worker], self._streams[worker]
        batches = (batch for event in events for batch in stream.of(event))
        self._due.extend(_Due(now_s + LAG_S, BatchArrived(rank, batch)) for batch in batches)
