"""Checks whether ranks publish their blocks, and whether that is trusted.

    prompts are prefilled there without event source,    events.none
    without block reuse, or with blocks in use of
    which no event was ever published
    an agent's counters of losses grew                   events.lost
    a router did not trust it, at both looks             rank.untrusted

Only if a mode reads overlap: other modes do not use the index. A rank that is FALLBACK without parity, or because its
worker has no events, is reported by the checks of these.
"""

from collections.abc import Iterator

from router.doctor.catalogue import Finding, names
from router.doctor.facts import LOSSES, Counts, FleetFacts, RankStatus
from router.doctor.pairing import PREFILLING
from router.fleet.trust import PARITY_FIELDS

SILENT_BLOCKS = 64
"""Blocks in use without any event: fewer may all be of first requests, whose blocks are published once computed."""
_UNTRUSTED = ("FALLBACK", "DEGRADED")


def events(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the workers whose blocks are not known, or not kept, and those that lose events."""
    if not facts.is_by_prefix:
        return
    for worker in facts.living():
        registration = worker.registration
        if registration.role in PREFILLING:
            lacks = ["event_source none"] if registration.event_source == "none" else []
            lacks += ["block_reuse false"] if registration.block_reuse is False else []
            if lacks:
                words = f"{', '.join(lacks)}, and the mode chooses by what is held"
                yield Finding("events.none", registration.worker_id, words)
        lost = {name: growth(worker.before, worker.after, name) for name in LOSSES}
        words = "; ".join(f"{count:.0f} {LOSSES[name]} ({name})" for name, count in lost.items() if count > 0)
        if words:
            yield Finding("events.lost", registration.worker_id, f"in {facts.window_s:.1f} s: {words}")
    yield from _silent(facts)


def _silent(facts: FleetFacts) -> Iterator[Finding]:
    registrations = {
        worker.registration.worker_id: worker.registration
        for worker in facts.living()
        if worker.registration.event_source != "none"
    }
    for head in facts.heads:
        worker = registrations.get(head.rank.worker_id)
        if worker is None or worker.instance != head.instance or head.last_seq or head.stale:
            continue
        if (blocks := facts.used_blocks.get(head.rank, 0)) >= SILENT_BLOCKS:
            words = f"its engine reports {blocks} blocks in use, and told of none (event_source {worker.event_source})"
            yield Finding("events.none", str(head.rank), words)


def growth(before: Counts, after: Counts, name: str) -> float:
    """Return the growth of a counter; 0 if it was not read twice."""
    return max(0.0, after[name] - before[name]) if name in before and name in after else 0.0


def trust(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the ranks that a router did not trust at both looks, by reason."""
    eventful = {each.registration.worker_id for each in facts.living() if each.registration.event_source != "none"}
    for router in facts.routers:
        was = {(each.rank, each.trust) for each in router.before.ranks}
        reasons: dict[str, list[str]] = {}
        for each in router.after.ranks if router.reads_overlap else ():
            if (each.rank, each.trust) in was and each.rank.worker_id in eventful and _is_untrusted(each):
                reasons.setdefault(f"{each.trust}: {each.trust_reason}", []).append(str(each.rank))
        for reason, ranks in reasons.items():
            yield Finding("rank.untrusted", names(ranks), f"{reason} (router {router.control.url})")


def _is_untrusted(rank: RankStatus) -> bool:
    return rank.trust in _UNTRUSTED and not rank.trust_reason.startswith(PARITY_FIELDS)
