"""Checks whether routers serve, have capacity, and are guarded.

router.unreachable   control or data plane does not answer
router.not_ready     /ready is 503
router.open          a control plane beyond loopback answers without a token
worker.open          an agent does
router.other_fleet   it knows none of the living workers: it reads another log
index.full           ranks were refused, or lack blocks, for lack of memory
index.nearly_full    the index takes more than `FULL_RATIO` of its memory
breaker.open         a rank gets no requests
queue.full           a queue is near its bound, or requests were refused for load during the survey
journal.off          no decision is recorded
"""

from collections.abc import Iterator

from router.doctor.event_checks import growth
from router.doctor.facts import Bounds, FleetFacts, RouterSeen
from router.doctor.findings import Finding, names

FULL_RATIO = 0.9
"""Of the index's memory and of queues: the next burst takes the rest."""
_JOURNAL = "kvrouter_journal_records_total"
_REJECTED = "kvrouter_rejected_total"
_AVOIDED = ("breaker", "busy")


def planes(facts: FleetFacts) -> Iterator[Finding]:
    """Yield addresses that do not serve, or that serve without a token."""
    for answer in [*(router.control for router in facts.routers), *facts.planes]:
        if answer.problem:
            yield Finding("router.unreachable", answer.url, answer.problem)
        elif not answer.is_well:
            yield Finding("router.not_ready", answer.url, answer.reason)
    workers = [worker.http for worker in facts.workers if worker.http is not None]
    for check, answers in (("router.open", [router.control for router in facts.routers]), ("worker.open", workers)):
        for answer in answers:
            if answer.is_open:
                yield Finding(check, answer.url, "beyond loopback, it answers without a token")


def routers(facts: FleetFacts) -> Iterator[Finding]:
    """Yield problems inside the routers that answered."""
    living = {worker.registration.worker_id for worker in facts.living()}
    for router in facts.routers:
        if router.control.problem:
            continue
        if living and router.mode and living.isdisjoint(router.workers):
            words = f"it knows {names(list(router.workers)) or 'no worker'}; {names(sorted(living))} live on this log"
            yield Finding("router.other_fleet", router.control.url, words)
        yield from _index(router, facts.bounds)
        yield from _avoided(router)
        yield from _queue(router, facts)
        if router.after.metrics and _JOURNAL not in router.after.metrics:
            yield Finding("journal.off", router.control.url, "journal.enabled is false")


def _index(router: RouterSeen, bounds: Bounds) -> Iterator[Finding]:
    metrics, url = router.after.metrics, router.control.url
    overfull = metrics.get("kvrouter_index_overfull_ranks", 0)
    refused = metrics.get("kvrouter_index_refused_ranks", 0)
    used, most = metrics.get("kvrouter_index_memory_bytes", 0), bounds.index_memory_bytes_max
    if overfull or refused:
        yield Finding("index.full", url, f"{overfull:.0f} ranks lack blocks, {refused:.0f} have no place")
    elif most and used >= FULL_RATIO * most:
        yield Finding("index.nearly_full", url, f"{used:.0f} of {most} bytes (index.memory_bytes_max) are taken")


def _avoided(router: RouterSeen) -> Iterator[Finding]:
    for each in router.after.ranks:
        if each.unfit.startswith(_AVOIDED):
            yield Finding("breaker.open", str(each.rank), f"{each.unfit} (router {router.control.url})")


def _queue(router: RouterSeen, facts: FleetFacts) -> Iterator[Finding]:
    before, after, bounds = router.before.metrics, router.after.metrics, facts.bounds
    words = [
        f"{name} is {after[name]:.0f} of {most} ({setting})"
        for name, most, setting in (
            ("kvrouter_queued_requests", bounds.queue_requests_max, "queue.requests_max"),
            ("kvrouter_inflight_requests", bounds.inflight_requests_max, "queue.inflight_requests_max"),
        )
        if after.get(name, 0) >= FULL_RATIO * most
    ]
    if refused := growth(before, after, _REJECTED):
        kinds = [name for name in after if name.startswith(f"{_REJECTED}{{") and growth(before, after, name)]
        reasons = ", ".join(name.removeprefix(f"{_REJECTED}{{").removesuffix("}") for name in kinds)
        words.append(f"{refused:.0f} requests refused in {facts.window_s:.1f} s ({reasons})")
    if words:
        yield Finding("queue.full", router.control.url, "; ".join(words))
