"""Checks whether ranks publish their blocks, and whether that is trusted.

    event source none, prompts are prefilled there       events.none
    blocks in use, and no event was ever published       events.silent
    an agent's counters of losses grew                   events.lost
    a rank's consolidator does not vouch for it          rank.source
    a router did not trust it, at both looks             rank.fallback, rank.degraded
    gaps and resyncs continue                            stream.recoveries

Only if a mode reads overlap: other modes do not use the index. A rank that is FALLBACK without parity, or because its
worker has no events, is reported by the checks of these.
"""

from collections.abc import Iterator

from router.doctor.facts import LOSSES, Counts, FleetFacts, RankStatus, RouterSeen
from router.doctor.findings import Finding, names
from router.doctor.pairing import PREFILLING
from router.fleet.trust import PARITY_FIELDS

SILENT_BLOCKS = 64
"""Blocks in use without any event: fewer may all be of first requests, whose blocks are published once computed."""
RECOVERIES_MAX = 3
"""Of one rank within a survey: one is an outage that heals, two may be one of each end."""


def events(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the workers that publish no events, or lose some."""
    if not facts.is_by_prefix:
        return
    yield from _none(facts)
    yield from _silent(facts)
    for worker in facts.living():
        lost = {name: growth(worker.before, worker.after, name) for name in LOSSES}
        words = [f"{count:.0f} {LOSSES[name]} ({name})" for name, count in lost.items() if count > 0]
        if words:
            yield Finding(
                "events.lost", worker.registration.worker_id, f"in {facts.window_s:.1f} s: {'; '.join(words)}"
            )
    registered = {(worker.registration.worker_id, worker.registration.instance) for worker in facts.workers}
    for head in facts.heads:
        if head.stale and (head.rank.worker_id, head.instance) in registered:
            yield Finding("rank.source", str(head.rank), head.stale)


def _none(facts: FleetFacts) -> Iterator[Finding]:
    for worker in facts.living():
        registration = worker.registration
        if registration.event_source == "none" and registration.role in PREFILLING:
            yield Finding(
                "events.none", registration.worker_id, "event_source none, and the mode chooses by what is held"
            )


def _silent(facts: FleetFacts) -> Iterator[Finding]:
    used = {load.rank: load.used_blocks for load in facts.loads}
    registrations = {
        worker.registration.worker_id: worker.registration
        for worker in facts.living()
        if worker.registration.event_source != "none"
    }
    for head in facts.heads:
        worker = registrations.get(head.rank.worker_id)
        if worker is None or worker.instance != head.instance or head.last_seq or head.stale:
            continue
        if (blocks := used.get(head.rank, 0)) >= SILENT_BLOCKS:
            words = f"its engine reports {blocks} blocks in use, and told of none (event_source {worker.event_source})"
            yield Finding("events.silent", str(head.rank), words)


def growth(before: Counts, after: Counts, name: str) -> float:
    """Return the growth of a counter; 0 if it was not read twice."""
    return max(0.0, after[name] - before[name]) if name in before and name in after else 0.0


def trust(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the ranks that a router did not trust at both looks, by reason."""
    without = {worker.registration.worker_id for worker in facts.workers if worker.registration.event_source == "none"}
    living = {worker.registration.worker_id for worker in facts.living()}
    for router in facts.routers:
        if not router.reads_overlap:
            continue
        for check, state in (("rank.fallback", "FALLBACK"), ("rank.degraded", "DEGRADED")):
            apart = [each for each in _lasting(router, state) if each.rank.worker_id in living]
            yield from _by_reason(check, router, [each for each in apart if each.rank.worker_id not in without])
        yield from _recoveries(router, facts.window_s)


def _lasting(router: RouterSeen, state: str) -> Iterator[RankStatus]:
    was = {each.rank for each in router.before.ranks if each.trust == state}
    for each in router.after.ranks:
        if each.trust == state and each.rank in was and not each.trust_reason.startswith(PARITY_FIELDS):
            yield each


def _by_reason(check: str, router: RouterSeen, ranks: list[RankStatus]) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for each in ranks:
        reasons.setdefault(each.trust_reason, []).append(str(each.rank))
    for reason, ranks_of in reasons.items():
        yield Finding(check, names(ranks_of), f"{reason} (router {router.control.url})")


def _recoveries(router: RouterSeen, window_s: float) -> Iterator[Finding]:
    for rank, count in router.after.recoveries.items():
        grown = count - router.before.recoveries.get(rank, count)
        if grown >= RECOVERIES_MAX:
            words = f"{grown} gaps, repairs and resyncs in {window_s:.1f} s (router {router.control.url})"
            yield Finding("stream.recoveries", rank, words)
