"""Checks each worker: whether it is alive, reachable, and the one that registered.

    heartbeats                     HTTP                   registered         finding
    of all ranks                   healthy                yes                none
    of some ranks, or of none      -                      yes                worker.silent
    of any                         dead, or unhealthy     yes                worker.unhealthy
    of any                         -                      it left, and why   worker.withdrawn

    two heads of one rank at the same time, one address, or one id under two models    worker.doubled

Consecutive heads are a restart. Without the log, missing heartbeats mean nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

from router.doctor.catalogue import Finding, names
from router.doctor.facts import FleetFacts, StreamHead

_T = TypeVar("_T")
_K = TypeVar("_K")


def presence(facts: FleetFacts) -> Iterator[Finding]:
    """Yield workers that are missing from the fleet, or from HTTP."""
    if not facts.workers and not facts.log.problem:
        refused = f"; refused: {facts.refused}" if facts.refused else ""
        words = f"no worker is registered; {len(facts.left)} left, {facts.draining} drain{refused}"
        yield Finding("fleet.empty", "the fleet", words)
    beating = {(head.rank, head.instance) for head in facts.heads}
    for worker in facts.workers:
        registration, http = worker.registration, worker.http
        silent = [each for each in registration.ranks if (each, registration.instance) not in beating]
        if silent and not facts.log.problem:
            answers = "was not asked" if http is None else f"says {http.problem or http.reason or 'that all is well'}"
            words = f"no heartbeat of {names(list(map(str, silent)))} in {facts.window_s:.1f} s; its HTTP {answers}"
            yield Finding("worker.silent", registration.worker_id, words)
        elif http is not None and (words := http.problem or http.reason):
            yield Finding("worker.unhealthy", registration.worker_id, words)
    for worker_id in sorted({head.rank.worker_id for head in facts.heads} & facts.left.keys()):
        words = f"it beats, and left: {facts.left[worker_id] or 'no reason given'}"
        yield Finding("worker.withdrawn", worker_id, words)


def doubles(facts: FleetFacts) -> Iterator[Finding]:
    """Yield unique values that two workers state."""
    for rank, heads in _by(sorted(facts.heads, key=lambda head: head.first_s), lambda head: head.rank).items():
        if words := next((_at_once(one, other) for one, other in pairwise(heads) if _overlap(one, other)), ""):
            yield Finding("worker.doubled", str(rank), words)
    living = [worker.registration for worker in facts.living()]
    for url, at in _by(living, lambda registration: registration.base_url.rstrip("/").lower()).items():
        if len(at) > 1:
            ids = names([registration.worker_id for registration in at])
            yield Finding("worker.doubled", ids, f"all are at {url}")
    for worker_id, same in _by(living, lambda registration: registration.worker_id).items():
        models = sorted({registration.model for registration in same})
        if len(models) > 1:
            yield Finding("worker.doubled", worker_id, f"it is registered for several models: {names(models)}")


def _overlap(one: StreamHead, other: StreamHead) -> bool:
    return other.first_s < one.last_s and one.first_s < other.last_s


def _at_once(one: StreamHead, other: StreamHead) -> str:
    if one.instance == other.instance:
        return f"epochs {one.epoch} and {other.epoch} of instance {one.instance} beat at the same time"
    return f"instances {one.instance} and {other.instance} beat at the same time"


def _by(every: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    found: dict[_K, list[_T]] = {}
    for each in every:
        found.setdefault(key(each), []).append(each)
    return found
