"""Findings with their severity, consequence and remedy, and the facts of a fleet that the checks read.

error      requests fail, or are routed by wrong facts
warning    the fleet serves worse than it could, or something is about to fail

`docs/reference/doctor.md` is the table `CATALOGUE`. An id must not change its meaning: alerts and scripts rely on it.

The facts are what a survey observed of the log for a while, and of HTTP addresses once or twice:

    the log        workers that are registered, draining or left; each epoch with heartbeats of each rank's stream;
                   how full it is
    a router       its control plane, twice; its data plane once
    a worker       /health once

Unobserved facts are absent or have a `problem`; no check may take them for healthy or for broken.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank

Severity = Literal["error", "warning"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong. `id` is a key of `CATALOGUE`; `of` names what it is about."""

    id: str
    of: str
    found: str


class Meaning(msgspec.Struct, frozen=True):
    """Severity, consequence and remedy of a finding."""

    severity: Severity
    why: str
    fix: str


_NAMES_MAX = 8
CATALOGUE: Mapping[str, Meaning] = {
    "fleet.empty": Meaning(
        "error",
        "every request is refused with 503 `no_worker`",
        "start agents, decode workers too where others prefill, with this `--nats-url` and the same `nats.fleet_keys`",
    ),
    "worker.silent": Meaning(
        "error",
        "after five missed heartbeats the index forgets the rank; a worker without any heard rank gets no request",
        "its agent's log and `/status`: does it reach this log? Start it anew, or forget it: `DELETE /v1/workers/{id}`",
    ),
    "worker.unhealthy": Meaning(
        "error",
        "its heartbeats come, so it is chosen; every request sent there fails and is tried again elsewhere",
        "can routers reach its `base_url`? Does its engine live? The agent's log says why; start it anew, or drain it",
    ),
    "worker.withdrawn": Meaning(
        "warning",
        "its agent runs and has taken the worker out of the fleet: it gets no request until it registers again",
        "fix what the reason names; if it was removed by hand, stop its agent or start it anew",
    ),
    "worker.doubled": Meaning(
        "error",
        "two processes have one id, one rank's stream or one address: a router credits one with the other's cache",
        "give each its own `worker.id`, `worker.port` and `worker.advertise_host`; stop the surplus agent",
    ),
    "router.not_ready": Meaning(
        "error",
        "a balancer sends it nothing; requests that still come are refused, or routed by half an index",
        "the reason: no answer, start it or correct `--router` and `--data`; an index that catches up is done soon",
    ),
    "router.other_fleet": Meaning(
        "error",
        "the router and these workers do not read the same log: it will never send them anything",
        "the same `nats.url` for routers and agents",
    ),
    "breaker.open": Meaning(
        "warning",
        "the rank failed, or answered 429 or 503: the other ranks do its work",
        "the worker's log; if it goes on, drain it: `POST /v1/workers/{id}/drain`",
    ),
    "parity.hashes": Meaning(
        "error",
        "blocks of some workers have other hashes: their events are of no use, and their ranks are FALLBACK",
        "engines of a model with one block size, one processor, the same options (EAGLE); agents of one version",
    ),
    "parity.tokens": Meaning(
        "error",
        "router and workers make different tokens of one prompt: no prefix is found, or answers are to another prompt",
        "the same model directory, chat template and its variables: `tokens.text` at routers, the engine's at agents",
    ),
    "parity.kv_events": Meaning(
        "error",
        "the blocks of its requests appear at another worker: predictions of both are wrong",
        "each engine's own event address: two were swapped, or one was copied (`kv-events`, `--kv-events`)",
    ),
    "pair.dtype": Meaning(
        "error",
        "the data types of their KV caches differ, or one is unknown: these workers are in no pair, decode prefills",
        "one `kv_cache_config.dtype` for all, or one checkpoint; `engine.kv_cache_dtype` of an attached engine",
    ),
    "pair.transfer": Meaning(
        "error",
        "prefill and decode workers cannot exchange KV, or no long prompt's: it is computed twice, or transfers stop",
        "one transceiver backend for all; `max_tokens_in_buffer` at the longest input",
    ),
    "pair.alone": Meaning(
        "warning",
        "no partner: what it prefills is fetched by none, or it computes the prompts of the streams that it decodes",
        "start workers of the other role, in its `worker.transfer_domain`, or give it the role aggregated",
    ),
    "events.none": Meaning(
        "warning",
        "what it holds is not known, or it keeps nothing: routing by prefix is a guess there",
        "KV events (`--publish-kv-events`, `event_buffer_max_size`) and block reuse at the engine; or a mode by load",
    ),
    "rank.untrusted": Meaning(
        "warning",
        "its overlap is the last known one at half credit (DEGRADED), or what was routed to it (FALLBACK)",
        '`docs/RUNBOOKS.md`, "Is every rank trusted?", by the reason',
    ),
    "log.unreachable": Meaning(
        "error",
        "no worker can register and no KV event arrives; routers go on from memory, which becomes outdated",
        "start nats-server with JetStream and a router, which makes streams; correct `--nats-url`, `nats.credentials`",
    ),
    "log.full": Meaning(
        "warning",
        "events or registrations are dropped next: a purge waits for a snapshot, or the server's disk is used up",
        "`snapshot_failed` in routers' logs; `nats.events_max_bytes`, `nats.snapshots_bytes_max`, `max_file_store`",
    ),
}


def names(every: list[str]) -> str:
    """Join the first eight names with commas, and add how many more there are."""
    more = f" and {len(every) - _NAMES_MAX} more" if len(every) > _NAMES_MAX else ""
    return ", ".join(every[:_NAMES_MAX]) + more


class AddressAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one address."""

    url: str
    problem: str = ""
    """Why it did not answer; empty if it did."""
    reason: str = ""
    """Why it is not ready, or not healthy, by its own answer; empty if it is."""


class StreamHead(msgspec.Struct, frozen=True):
    """One epoch of a rank's stream, and its first and last heartbeat in seconds since the survey began."""

    rank: WorkerRank
    instance: str
    epoch: int
    first_s: float
    last_s: float
    last_seq: int
    stale: str = ""


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker, and its answer at /health."""

    registration: WorkerRegistered
    http: AddressAnswer


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


class Differs(msgspec.Struct, frozen=True):
    """A field in which a worker differs from how a router hashes prompts."""

    field: str
    allowed: str | int
    found: str | int | float = ""


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker of a router's `/v1/workers`."""

    registration: WorkerRegistered
    ranks: list[RankStatus] = []
    differs: list[Differs] = []


class Workers(msgspec.Struct, frozen=True):
    """A router's `/v1/workers`."""

    workers: list[WorkerRow]

    def ranks(self) -> list[RankStatus]:
        """Return the ranks of all workers."""
        return [rank for worker in self.workers for rank in worker.ranks]


class RouterSeen(msgspec.Struct, kw_only=True):
    """One router by its control plane, its workers at the beginning and at the end; `mode` empty: not stated."""

    control: AddressAnswer
    mode: str = ""
    reads_overlap: bool = True
    before: Workers = Workers([])
    after: Workers = Workers([])


class FleetFacts(msgspec.Struct, kw_only=True):
    """All facts, of `window_s` seconds. `reads_overlap`: whether the configured mode does, if no router states one."""

    window_s: float = 0.0
    workers: Sequence[WorkerSeen] = ()
    draining: int = 0
    left: Mapping[str, str] = {}
    """Why each worker left, by its id; without those that have come back."""
    heads: Collection[StreamHead] = ()
    """Every epoch of every rank with heartbeats."""
    used_blocks: dict[WorkerRank, int] = {}
    """By rank, the most KV blocks in use that its engine reported."""
    refused: str = ""
    """The subject of the newest refused fleet event, and why it was refused; empty: none was."""
    routers: Sequence[RouterSeen] = ()
    planes: Sequence[AddressAnswer] = ()
    """The answers of data planes."""
    log_problem: str = ""
    """Why the log could not be read, or not to the end."""
    fills: Mapping[str, tuple[int, int]] = {}
    """By `KV_EVENTS` and `the store`: the bytes taken and allowed; 0 or less: no bound."""
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
            if self.log_problem or (worker.registration.worker_id, worker.registration.instance) in beating:
                yield worker

    def models(self) -> dict[str, list[WorkerRegistered]]:
        """Return the living workers' registrations, by the first name that each serves."""
        found: dict[str, list[WorkerRegistered]] = {}
        for worker in self.living():
            name = next(iter(worker.registration.served_names), worker.registration.model)
            found.setdefault(name, []).append(worker.registration)
        return found
