"""Checks the log, and whether routers serve, read the same log and have capacity.

log.unreachable      the log did not answer, or lacks a stream
log.full             `KV_EVENTS`, or the server's store, is nearly full
router.not_ready     control or data plane does not answer, or /ready is 503
router.other_fleet   the router knows none of the living workers: it reads another log
index.full           the index has no memory for a rank, or for some of its blocks
breaker.open         a rank gets no requests: its breaker is open, or it said that it is busy
queue.full           a queue is near its bound, or requests were refused for load during the survey
"""

from collections.abc import Iterator

from router.doctor.catalogue import Finding, names
from router.doctor.event_checks import growth
from router.doctor.facts import FleetFacts, RouterSeen

FULL_RATIO = 0.9
"""A queue or log filled to this share is nearly full. The log is purged at 3/4 of its limit if a snapshot allows it."""
_REJECTED = "kvrouter_rejected_total"
_AVOIDED = ("breaker", "busy")


def log(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the problems of the log."""
    if facts.log.problem:
        yield Finding("log.unreachable", "the log", facts.log.problem)
    for name, (used, most) in facts.log.fills.items():
        if most > 0 and used >= FULL_RATIO * most:
            yield Finding("log.full", name, f"{used} of {most} bytes are taken")


def planes(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the planes of routers that do not serve."""
    for answer in [*(router.control for router in facts.routers), *facts.planes]:
        if words := answer.problem or answer.reason:
            yield Finding("router.not_ready", answer.url, words)


def routers(facts: FleetFacts) -> Iterator[Finding]:
    """Yield problems inside the routers that answered."""
    living = {worker.registration.worker_id for worker in facts.living()}
    for router in facts.routers:
        if router.control.problem:
            continue
        if living and router.mode and living.isdisjoint(router.workers):
            known = names(list(router.workers)) or "no worker"
            words = f"the router knows {known}, but on this log live {names(sorted(living))}"
            yield Finding("router.other_fleet", router.control.url, words)
        yield from _index(router)
        yield from _avoided(router)
        yield from _queue(router, facts)


def _index(router: RouterSeen) -> Iterator[Finding]:
    overfull, refused = (
        router.after.metrics.get(f"kvrouter_index_{what}_ranks", 0) for what in ("overfull", "refused")
    )
    if overfull or refused:
        words = f"{overfull:.0f} ranks lack blocks, {refused:.0f} are not in the index"
        yield Finding("index.full", router.control.url, words)


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
