"""A busy router without a network, as a decision finds it.

Prompts come in families: all of one begin with the same half. Every rank holds beginnings of some prompts, its stream
is followed, and `in_flight` requests a rank are promised. The seed determines everything.
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from bench.routing.virtual_router import LEASE_S, VirtualClock, VirtualIndex
from bench.routing.virtual_worker import MODEL, TEXT, describe, registered
from indexer.embedded import hash_blocks
from indexer.follow.inputs import BatchArrived, HeartbeatArrived
from indexer.native.index import NativeIndex
from kv_protocol.codec import unpack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.events import Batch, Stored
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, WorkerHeard
from router.decision.policy import Policy
from router.decision.recorders import Recorder
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings

BLOCK_SIZE = 16
PROMPTS, FAMILIES = 64, 8
HELD_PROMPTS = 6
"""Of so many prompts a rank holds a beginning."""
IN_FLIGHT = 12
_EPOCH = 1
_TOKEN_BYTES = 4


class DecisionShape(NamedTuple):
    """How many ranks there are, and of how many full blocks a prompt is."""

    ranks: int
    blocks: int
    mode: str = "kv"
    in_flight: int = IN_FLIGHT
    """Promised requests a rank."""


class DecisionFleet:
    """One router with its index, and the prompts of the requests."""

    def __init__(self, shape: DecisionShape, seed: int, recorder: Recorder | None = None) -> None:
        self._random = Random(seed)  # noqa: S311 - a workload, not a secret
        self._shape = shape
        self.clock = VirtualClock()
        self.clock.now_s = 1.0
        self.index = VirtualIndex(NativeIndex())
        self.state = RouterState(StateSettings(text=TEXT, lease_s=LEASE_S))
        policy = Policy.current(mode=shape.mode)
        self.routing = Routing(
            self.state,
            self.index,
            self.clock,
            policy,
            seed=seed,
            lease_s=LEASE_S,
            decisions_max=1000,
            recorder=recorder,
        )
        self.prompts = [self._prompt(family) for family in self._families() for _ in range(PROMPTS // FAMILIES)]
        self._decisions = 0
        self._join()
        for request in self.requests(shape.in_flight * shape.ranks):
            self.routing.take(self.routing.decide(request))

    def requests(self, count: int) -> Iterator[RouteRequest]:
        """Yield requests of prompts drawn one after another."""
        for _ in range(count):
            yield self.request(self._random.choice(self.prompts))

    def request(self, tokens: bytes) -> RouteRequest:
        """Return a request of these tokens, hashed."""
        self._decisions += 1
        name = f"d{self._decisions}"
        return RouteRequest(
            decision_id=name,
            request_id=name,
            model=MODEL,
            isl_tokens=len(tokens) // _TOKEN_BYTES,
            block_size=BLOCK_SIZE,
            sequence_hashes=hash_blocks(tokens, BLOCK_SIZE),
        )

    def _families(self) -> list[bytes]:
        return [self._tokens(self._shape.blocks // 2) for _ in range(FAMILIES)]

    def _prompt(self, family: bytes) -> bytes:
        own_blocks = self._shape.blocks - self._shape.blocks // 2
        return family + self._tokens(own_blocks) + self._random.randbytes(_TOKEN_BYTES)

    def _tokens(self, blocks: int) -> bytes:
        return self._random.randbytes(_TOKEN_BYTES * BLOCK_SIZE * blocks)

    def _join(self) -> None:
        hashes = [unpack_u64(hash_blocks(prompt, BLOCK_SIZE)) for prompt in self.prompts]
        for number in range(self._shape.ranks):
            rank = WorkerRank(f"w{number}", 0)
            joined = registered(rank, describe(kv_tokens=1 << 22, block_size=BLOCK_SIZE, max_seq_len=1 << 20))
            self.routing.apply(FleetApplied(now_s=0.0, event=joined))
            self.routing.apply(WorkerHeard(now_s=0.5, worker_id=rank.worker_id, instance=joined.instance))
            self.index.apply(HeartbeatArrived(rank, Heartbeat(instance=joined.instance, epoch=_EPOCH, last_seq=0)), 0.0)
            for seq, chain in enumerate(self._random.sample(hashes, HELD_PROMPTS), 1):
                stored = Stored(tuple(chain[: self._random.randint(1, len(chain))]))
                self.index.apply(BatchArrived(rank, Batch(_EPOCH, seq, stored)), 0.0)
