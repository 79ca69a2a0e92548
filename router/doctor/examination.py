"""Runs all checks of a fleet and summarises the findings.

exit code   0 nothing     1 warnings     2 errors     (3: it could not look; the command's)
"""

from collections.abc import Callable, Iterable, Sequence

from router.doctor import event_checks, parity_checks, router_checks, worker_checks
from router.doctor.catalogue import SEVERITIES, Finding, Severity, severity
from router.doctor.facts import FleetFacts
from router.doctor.pairing import pairing_findings, partner_findings

_EXIT_CODES: dict[Severity, int] = {"error": 2, "warning": 1}


def _pairing(facts: FleetFacts) -> Iterable[Finding]:
    for registrations in facts.models().values():
        yield from pairing_findings(registrations)
        yield from partner_findings(registrations)


CHECKS: tuple[Callable[[FleetFacts], Iterable[Finding]], ...] = (
    router_checks.log,
    worker_checks.presence,
    worker_checks.doubles,
    router_checks.planes,
    router_checks.routers,
    parity_checks.parity,
    parity_checks.observed,
    _pairing,
    event_checks.events,
    event_checks.trust,
)


def examine(facts: FleetFacts) -> list[Finding]:
    """Return what is wrong: the worst first, then by id and by the subject of the finding; each once."""
    found = dict.fromkeys(finding for check in CHECKS for finding in check(facts))
    return sorted(found, key=lambda each: (SEVERITIES.index(severity(each)), each.id, each.of))


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the exit code of a look that found these."""
    return max((_EXIT_CODES[severity(finding)] for finding in findings), default=0)
