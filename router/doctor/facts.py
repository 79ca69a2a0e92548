"""What the survey observed of a fleet: its log for a while, and every HTTP address at the beginning and the end.

    the log        workers that are registered, draining or left; each head of each rank's stream with heartbeats;
                   what it keeps
    a router       its control plane, twice; its data plane once
    a worker       /health once; its counters twice

Unobserved facts are absent or have a `problem`; no check takes them for healthy or for broken.
"""

from collections.abc import Iterator, Mapping

import msgspec

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank

WATCHED = (
    "kvrouter_index_overfull_ranks",
    "kvrouter_index_refused_ranks",
    "kvrouter_queued_requests",
    "kvrouter_inflight_requests",
    "kvrouter_rejected_total",
)
"""Metrics of a router that checks read."""
LOSSES: Mapping[str, str] = {
    "kvrouter_outbox_dropped_total": "batches given up, the outbox is full",
    "kvrouter_publish_failures_total": "publications that NATS did not confirm",
    "kvrouter_event_id_gaps_total": "holes in the engine's event ids, its buffer overflowed",
    "kvrouter_engine_poll_failures_total": "polls that the engine refused",
    "kvrouter_zmq_lost_total": "holes on hop A that no replay filled",
}
"""Counters of an agent that grow when events are lost or late, and what they count."""

Counts = Mapping[str, float]
"""Metrics by name; where one has labels, the sum, and each by `name{value,...}` of its labels in their order."""


class AddressAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one address."""

    url: str
    problem: str = ""
    """Why it did not answer; empty if it did."""
    reason: str = ""
    """Why it is not ready, or not healthy, by its own answer; empty if it is."""


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch of a rank's stream with heartbeats, first and last; seconds since the survey began."""

    rank: WorkerRank
    instance: str
    epoch: int
    first_s: float
    last_s: float
    last_seq: int
    stale: str = ""


class WorkerSeen(msgspec.Struct, kw_only=True):
    """One registered worker, and its HTTP answers: None if it was not asked."""

    registration: WorkerRegistered
    http: AddressAnswer | None = None
    before: Counts = {}
    after: Counts = {}


class RankStatus(msgspec.Struct, frozen=True):
    """One rank by a router's `/v1/workers`: trust, and why it takes no work (empty: it does)."""

    worker_id: str
    dp_rank: int
    trust: str = ""
    trust_reason: str = ""
    unfit: str = ""

    @property
    def rank(self) -> WorkerRank:
        """The rank."""
        return WorkerRank(self.worker_id, self.dp_rank)


class ParityBroken(msgspec.Struct, frozen=True):
    """A field in which a worker differs from how a router hashes prompts."""

    worker_id: str
    field: str
    allowed: str
    found: str = ""


class RouterLook(msgspec.Struct, frozen=True, kw_only=True):
    """A router at one moment."""

    ranks: tuple[RankStatus, ...] = ()
    metrics: Counts = {}


class RouterSeen(msgspec.Struct, kw_only=True):
    """One router by its control plane, at the beginning and at the end; `mode` empty: not stated."""

    control: AddressAnswer
    mode: str = ""
    reads_overlap: bool = True
    workers: tuple[str, ...] = ()
    broken: tuple[ParityBroken, ...] = ()
    before: RouterLook = RouterLook()
    after: RouterLook = RouterLook()


class LogSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The log: why it could not be read, or by `KV_EVENTS` and `the store` the bytes taken and allowed; 0: no bound."""

    problem: str = ""
    fills: Mapping[str, tuple[int, int]] = {}


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of the given configuration: a running router does not state its own."""

    queue_requests_max: int
    inflight_requests_max: int


class FleetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts, of `window_s` seconds. `reads_overlap`: by the configuration, if no router states it."""

    window_s: float
    bounds: Bounds
    workers: tuple[WorkerSeen, ...] = ()
    draining: int = 0
    left: Mapping[str, str] = {}
    """Workers whose newest fleet event is that they left, and why."""
    heads: tuple[StreamHead, ...] = ()
    used_blocks: Mapping[WorkerRank, int] = {}
    """The most that each rank's engine reported."""
    refused: str = ""
    """Why the newest refused fleet event was."""
    routers: tuple[RouterSeen, ...] = ()
    planes: tuple[AddressAnswer, ...] = ()
    """Data planes."""
    log: LogSeen = LogSeen()
    reads_overlap: bool = True

    @property
    def is_by_prefix(self) -> bool:
        """Whether any router reads overlap."""
        modes = [router.reads_overlap for router in self.routers if router.mode]
        return any(modes) if modes else self.reads_overlap

    def living(self) -> Iterator[WorkerSeen]:
        """Yield the registered workers with heartbeats; all workers if the log could not be read."""
        beating = {(head.rank.worker_id, head.instance) for head in self.heads}
        for worker in self.workers:
            if self.log.problem or (worker.registration.worker_id, worker.registration.instance) in beating:
                yield worker

    def models(self) -> dict[str, list[WorkerRegistered]]:
        """Return the living workers' registrations, by the first name that each serves."""
        found: dict[str, list[WorkerRegistered]] = {}
        for worker in self.living():
            name = next(iter(worker.registration.served_names), worker.registration.model)
            found.setdefault(name, []).append(worker.registration)
        return found
