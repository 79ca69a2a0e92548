"""Checks each worker: whether it is alive, reachable, and the one that registered.

    heartbeats   HTTP        registered                                 finding
    present      healthy     yes                                        none
    present      dead        yes                                        worker.unreachable
    present      unhealthy   yes                                        worker.unhealthy
    missing      answers     yes                                        worker.silent
    missing      dead        yes                                        worker.gone
    missing      not asked   yes                                        worker.silent
    present      -           it left, and stated why                    worker.withdrawn
    present      -           never; or not this rank, or this instance  rank.unregistered

    two heads of one rank at the same time                              worker.two_instances, rank.two_heads
    one address, one endpoint name                                      worker.one_address, worker.one_endpoint

Consecutive heads are a restart. Without the log, missing heartbeats mean nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.doctor.facts import FleetFacts, StreamHead, WorkerSeen
from router.doctor.findings import Finding, names

_SHARING = {"aggregated", "decode"}
"""Roles that have one default endpoint name (`worker_agent/fleet/endpoint_names.py`), which they may share."""


def presence(facts: FleetFacts) -> Iterator[Finding]:
    """Yield workers that are missing from the fleet, or from HTTP."""
    if not facts.workers and not facts.draining:
        yield Finding("fleet.empty", "the fleet", f"no worker is registered; {len(facts.left)} left")
    for source in facts.refused:
        yield Finding("fleet.unreadable", "the log", source)
    living = {(worker.registration.worker_id, worker.registration.instance) for worker in facts.living()}
    for worker in facts.workers:
        http = worker.http
        if (worker.registration.worker_id, worker.registration.instance) not in living:
            yield _silent(worker, facts.window_s)
        elif http is not None and http.problem:
            yield Finding("worker.unreachable", worker.registration.worker_id, http.problem)
        elif http is not None and not http.is_well:
            yield Finding("worker.unhealthy", worker.registration.worker_id, http.reason or "/health does not say why")
    for worker_id in facts.draining:
        yield Finding("worker.draining", worker_id, "it takes no new work")


def _silent(worker: WorkerSeen, window_s: float) -> Finding:
    silence, http = f"no heartbeat in {window_s:.1f} s", worker.http
    if http is not None and http.problem:
        return Finding("worker.gone", worker.registration.worker_id, f"{silence}, and {http.problem}")
    if http is not None and http.is_log_away:
        silence += "; its /status says that the log is away"
    answers = "its HTTP was not asked" if http is None else "its HTTP answers"
    return Finding("worker.silent", worker.registration.worker_id, f"{silence}; {answers}")


def heartbeats(facts: FleetFacts) -> Iterator[Finding]:
    """Yield missing, unknown and duplicate heartbeats."""
    if facts.log.problem:
        return
    known = {worker.registration.worker_id: worker.registration for worker in facts.workers}
    beating = {(head.rank, head.instance) for head in facts.heads}
    for worker in facts.living():
        registration = worker.registration
        silent = [str(rank) for rank in registration.ranks if (rank, registration.instance) not in beating]
        if silent:
            yield Finding("rank.silent", registration.worker_id, f"no heartbeat of {names(silent)}, other ranks beat")
    apart = {head.rank.worker_id for head in facts.heads if head.rank.worker_id not in known} - {*facts.draining}
    for worker_id in sorted(apart):
        yield _unregistered(worker_id, facts)
    for head in facts.heads:
        registered = known.get(head.rank.worker_id)
        if registered is not None and not _is_of(head, registered, beating):
            words = (
                f"instance {head.instance} beats; registered is {registered.instance} with ranks {_ranks(registered)}"
            )
            yield Finding("rank.unregistered", str(head.rank), words)


def _unregistered(worker_id: str, facts: FleetFacts) -> Finding:
    if worker_id in facts.left:
        return Finding(
            "worker.withdrawn", worker_id, f"it beats, and left: {facts.left[worker_id] or 'no reason given'}"
        )
    return Finding("rank.unregistered", worker_id, "it sends heartbeats, and no worker of that id is registered")


def _is_of(head: StreamHead, registration: WorkerRegistered, beating: set[tuple[WorkerRank, str]]) -> bool:
    """Return whether the head is the registered worker's; another one beside it is a restart, or found by `_heads`."""
    return head.rank.dp_rank in registration.dp_ranks and (head.rank, registration.instance) in beating


def _ranks(registration: WorkerRegistered) -> str:
    return names([str(dp_rank) for dp_rank in registration.dp_ranks])


def doubles(facts: FleetFacts) -> Iterator[Finding]:
    """Yield unique values that two workers state."""
    yield from _heads(facts)
    living = [worker.registration for worker in facts.living()]
    for url, at in _by(living, lambda registration: registration.base_url.rstrip("/").lower()).items():
        if len(at) > 1:
            yield Finding(
                "worker.one_address", names([registration.worker_id for registration in at]), f"all are at {url}"
            )
    for endpoint, at in _by(living, lambda registration: registration.endpoint).items():
        roles = sorted({registration.role for registration in at})
        if endpoint and len(roles) > 1 and {*roles} != _SHARING:
            yield Finding("worker.one_endpoint", endpoint, "; ".join(_role_words(role, at) for role in roles))
    for worker_id, same in _by(living, lambda registration: registration.worker_id).items():
        models = sorted({registration.model for registration in same})
        if len(models) > 1:
            yield Finding("worker.two_instances", worker_id, f"it is registered for several models: {names(models)}")


def _heads(facts: FleetFacts) -> Iterator[Finding]:
    """Yield for each rank the first two heads with heartbeats at the same time."""
    by_rank: dict[WorkerRank, list[StreamHead]] = {}
    for head in facts.heads:
        by_rank.setdefault(head.rank, []).append(head)
    for rank, heads in by_rank.items():
        heads.sort(key=lambda head: head.first_s)
        for one, other in pairwise(heads):
            if other.first_s < one.last_s and one.first_s < other.last_s:
                yield _double(rank, one, other)
                break


def _double(rank: WorkerRank, one: StreamHead, other: StreamHead) -> Finding:
    if one.instance == other.instance:
        words = f"epochs {one.epoch} and {other.epoch} of instance {one.instance} beat at the same time"
        return Finding("rank.two_heads", str(rank), words)
    words = f"instances {one.instance} and {other.instance} beat at the same time"
    return Finding("worker.two_instances", str(rank), words)


def _by(
    registrations: Iterable[WorkerRegistered], key: Callable[[WorkerRegistered], str]
) -> dict[str, list[WorkerRegistered]]:
    found: dict[str, list[WorkerRegistered]] = {}
    for registration in registrations:
        found.setdefault(key(registration), []).append(registration)
    return found


def _role_words(role: str, at: list[WorkerRegistered]) -> str:
    return f"{role}: {names([registration.worker_id for registration in at if registration.role == role])}"
