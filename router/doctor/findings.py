"""A finding: one thing that is wrong, and where. Its meaning is in `catalogue.py`.

error      requests fail, or are placed by what is not true
warning    it serves, worse than it could, or something is about to go wrong
"""

from typing import Literal, get_args

import msgspec

Severity = Literal["error", "warning"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""


class Finding(msgspec.Struct, frozen=True):
    """`id` is one of the catalogue's, and never changes its meaning; `of` names the objects, the worst first."""

    id: str
    of: str
    found: str


class Meaning(msgspec.Struct, frozen=True):
    """Severity, consequence and remedy of a finding."""

    severity: Severity
    why: str
    fix: str


_NAMES_MAX = 8


def names(every: list[str]) -> str:
    """Join the names with commas, the first eight of many."""
    more = f" and {len(every) - _NAMES_MAX} more" if len(every) > _NAMES_MAX else ""
    return ", ".join(every[:_NAMES_MAX]) + more
