"""The report as data: what `GET /v1/report` answers, and `router report --json` prints.

Numbers are sums, so reports of several routers are added field by field (`merged`).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any, Literal, NamedTuple, Self

import msgspec

from router.native import built

Dimension = Literal["model", "tenant", "lora", "prefix"]
DIMENSIONS: tuple[Dimension, ...] = ("model", "tenant", "lora", "prefix")


ROWS_MAX = 64
"""Names with a row of their own in each dimension: as many as a reader or a dashboard takes in."""
Source = Literal["router", "journal"]
"""Running routers, since they started; or their journals, for any period."""


class AttributionLimits(NamedTuple):
    """How many names have rows of their own in each dimension, and which block of a prompt names its family.

    `pending_max`: largest number of decisions without an outcome.
    """

    rows_max: int = ROWS_MAX
    family_blocks: int = 4
    pending_max: int = 65_536


def not_counted(found: built.Attribution, not_repeated: int = 0) -> dict[str, int]:
    """Return the number of decisions that are in no sum, by cause.

    `not_repeated`: those of a journal that lacks records before them, so that their candidates are not known.
    """
    not_answered, unseen, dropped, pending = found.not_counted()
    causes = {"not_answered": not_answered, "unseen": unseen, "dropped": dropped, "not_repeated": not_repeated}
    return {**causes, "pending": pending}


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of some requests: tokens, and seconds of a rank's prefill. `attribution.hpp` has the formulas.

    `reported_tokens` is the part of `reused_tokens` that workers reported; the rest is predicted. `learnt_s` is the
    part of `saved_s` by a learnt rate; the rest is by the reference engine's. `routing_tokens` is reused minus
    baseline. `evicted_blocks` is None where the source has no removals.
    """

    requests: int = 0
    compared_requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reported_tokens: int = 0
    baseline_tokens: float = 0.0
    routing_tokens: float = 0.0
    foregone_tokens: int = 0
    saved_s: float = 0.0
    learnt_s: float = 0.0
    baseline_s: float = 0.0
    routing_s: float = 0.0
    evicted_blocks: float | None = None

    def plus(self, other: "Figures") -> Self:
        """Return the sum, with the other fields of `self`; evictions are known if both are."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        blocks, others = self.evicted_blocks, other.evicted_blocks
        evicted_blocks = None if blocks is None or others is None else blocks + others
        return msgspec.structs.replace(self, **sums, evicted_blocks=evicted_blocks)


_DIGITS = 6
"""Of charged blocks: sums of shares are rounded to what was shared."""
_OF_CORE = (
    "requests", "compared_requests", "prompt_tokens", "reused_tokens", "reported_tokens", "baseline_tokens",
    "foregone_tokens", "saved_s", "learnt_s", "baseline_s", "evicted_blocks",
)  # fmt: skip
"""The fields of a core's sums, in its order."""
_SUMMED = tuple(name for name in Figures.__struct_fields__ if name != "evicted_blocks")


class Row(Figures, frozen=True, kw_only=True):
    """One name's figures. It had `missed_requests_max` requests more at most, which are part of `other`.

    A prefix's name is the sequence hash of a block, 16 hexadecimal digits; `title` is the name that the configuration
    gives to it, else empty.
    """

    name: str
    missed_requests_max: int = 0
    title: str = ""


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The names with most requests, and all else together; a name without a row had `absent_requests_max` at most."""

    rows: tuple[Row, ...]
    other: Figures
    absent_requests_max: int = 0


class SavingsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. `since` and `until` are of the wall clock, ISO 8601, UTC; empty: from the oldest record."""

    source: Source
    since: str
    until: str
    total: Figures
    by: dict[Dimension, Rows]
    not_counted: dict[str, int]
    """Requests, by why they are in no sum; `pending`: their outcome is not known yet."""
    removed_blocks: int | None = None
    """Blocks that ranks removed from their GPUs in the period, whatever caused it; None where `evicted_blocks` is."""


def _figures(sums: tuple[float, ...], *, has_evictions: bool) -> dict[str, Any]:
    """Return the fields of the core's sums, and what follows from them."""
    found: dict[str, Any] = dict(zip(_OF_CORE, sums, strict=True))
    found["routing_tokens"] = found["reused_tokens"] - found["baseline_tokens"]
    found["routing_s"] = found["saved_s"] - found["baseline_s"]
    found["evicted_blocks"] = round(found["evicted_blocks"], _DIGITS) if has_evictions else None
    return found


def total(found: built.Attribution, *, has_evictions: bool = False) -> Figures:
    """Return the present sums of all requests."""
    return Figures(**_figures(found.total(), has_evictions=has_evictions))


def top_rows(
    found: built.Attribution,
    dimension: Dimension,
    titles: Mapping[str, str] | None = None,
    *,
    has_evictions: bool = False,
) -> Rows:
    """Return the present sums by name, those with most requests first; `titles` are other names of them."""
    top, other, absent_max = found.top(DIMENSIONS.index(dimension))
    names = titles or {}
    rows = [
        Row(
            name=name,
            missed_requests_max=missed,
            title=names.get(name, ""),
            **_figures(sums, has_evictions=has_evictions),
        )
        for name, missed, sums in top
    ]
    rows.sort(key=lambda row: (-row.requests, row.name))
    rest = Figures(**_figures(other, has_evictions=has_evictions))
    return Rows(rows=tuple(rows), other=rest, absent_requests_max=absent_max)


def report_of(
    found: built.Attribution,
    source: Source,
    since: str,
    until: str,
    titles: Mapping[str, str] | None = None,
    *,
    not_repeated: int = 0,
    removed_blocks: int | None = None,
) -> SavingsReport:
    """Return the present report; `titles` names prefix families by their hash."""
    has_evictions = removed_blocks is not None
    return SavingsReport(
        source=source,
        since=since,
        until=until,
        total=total(found, has_evictions=has_evictions),
        by={
            each: top_rows(found, each, titles if each == "prefix" else None, has_evictions=has_evictions)
            for each in DIMENSIONS
        },
        not_counted=not_counted(found, not_repeated),
        removed_blocks=removed_blocks,
    )


def merged(reports: Sequence[SavingsReport], rows_max: int = ROWS_MAX) -> SavingsReport:
    """Return one report of several routers', of which there is at least one; each keeps `rows_max` names at most.

    A name that has a row in one report and none in another may be part of the other's `other`: its bound grows by that
    report's `absent_requests_max`.
    """
    first = reports[0]
    return msgspec.structs.replace(
        first,
        since=min(each.since for each in reports),
        until=max(each.until for each in reports),
        total=_sum(each.total for each in reports),
        by={each: _merged_rows([report.by[each] for report in reports], rows_max) for each in DIMENSIONS},
        not_counted={name: sum(each.not_counted[name] for each in reports) for name in first.not_counted},
    )


def _merged_rows(parts: list[Rows], rows_max: int) -> Rows:
    absent_max = sum(part.absent_requests_max for part in parts)
    named = sorted(((row, part) for part in parts for row in part.rows), key=lambda each: each[0].name)
    rows = list[Row]()
    for _, group in groupby(named, key=lambda each: each[0].name):
        found = list(group)
        missed = absent_max - sum(part.absent_requests_max for _, part in found)
        missed += sum(row.missed_requests_max for row, _ in found)
        row = reduce(Row.plus, [row for row, _ in found])
        rows.append(msgspec.structs.replace(row, missed_requests_max=missed))
    rows.sort(key=lambda row: (-row.requests, row.name))
    kept, cut = rows[:rows_max], rows[rows_max:]
    absent_max = max([absent_max, *(row.requests + row.missed_requests_max for row in cut)])
    other = _sum([*(part.other for part in parts), *map(_unnamed, cut)])
    return Rows(rows=tuple(kept), other=other, absent_requests_max=absent_max)


def _sum(figures: Iterable[Figures]) -> Figures:
    return reduce(Figures.plus, figures)


def _unnamed(row: Row) -> Figures:
    return Figures(**{name: getattr(row, name) for name in Figures.__struct_fields__})
