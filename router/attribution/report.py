"""The report as data, with which `GET /v1/report` answers, and for people, as text and as one HTML page. Pure.

Its numbers are sums, so reports of several routers are added field by field (`merged`). The page has no scripts, and
loads nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from html import escape
from itertools import groupby
from typing import Any, Literal, Self

import msgspec

from router.decision.report import aligned
from router.native import built

Dimension = Literal["model", "tenant", "lora", "prefix"]
DIMENSIONS: tuple[Dimension, ...] = ("model", "tenant", "lora", "prefix")
ROWS_MAX = 64
"""Names with a row of their own in each dimension: as many as a reader or a dashboard takes in."""
FAMILY_BLOCKS = 4
PENDING_MAX = 65_536
"""Largest number of decisions that wait for their outcome; beyond it the oldest are dropped."""
Source = Literal["router", "journal"]
"""Running routers, since they started; or their journals, for any period."""
_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
.scroll { overflow-x: auto; margin: 1.5rem 0 0; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; font-weight: 400; }
thead th { font-size: 12px; opacity: .7; }
th:first-child { text-align: left; }
.note { opacity: .7; }
"""
_TITLES: dict[Dimension, str] = {
    "model": "MODEL", "tenant": "TENANT", "lora": "LORA", "prefix": "PREFIX FAMILY"
}  # fmt: skip
_NAMELESS: dict[Dimension, str] = {
    "model": "(no name)", "tenant": "(not told apart)", "lora": "(base model)", "prefix": "(no full block)"
}  # fmt: skip
_WHY = {
    "not_answered": "that failed, were cancelled or were refused at the worker (after some, another one answered)",
    "unseen": "on a prompt that was not encoded: embeddings, or the mode reads no overlap and tokens.always is false",
    "dropped": "with an outcome that came too late",
    "not_repeated": "of which the journal lacks records before the decision",
    "pending": "that are not over",
}
_NAME_WIDTH = 40
_LONG_S = 10.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of some requests: tokens, and seconds of a rank's prefill. `attribution.hpp` has the formulas.

    `reported_tokens` is the part of `reused_tokens` that workers reported; the rest is predicted. `learnt_s` is the
    part of `saved_s` computed by a learnt rate, the rest by the reference engine's. `routing_tokens` is reused minus
    baseline. `evicted_blocks` is None if the source has no removals.
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

    @classmethod
    def of(cls, sums: tuple[float, ...], **named: object) -> Self:
        """Return the core's sums, what follows from them, and the `named` fields, which replace those of the core."""
        found: dict[str, Any] = dict(zip(_OF_CORE, sums, strict=True)) | named
        found["routing_tokens"] = found["reused_tokens"] - found["baseline_tokens"]
        found["routing_s"] = found["saved_s"] - found["baseline_s"]
        return cls(**found)

    def plus(self, other: "Figures") -> Self:
        """Return the sums, with the other fields of `self`; `evicted_blocks` is None if it is None in either."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        blocks, others = self.evicted_blocks, other.evicted_blocks
        evicted_blocks = None if blocks is None or others is None else blocks + others
        return msgspec.structs.replace(self, **sums, evicted_blocks=evicted_blocks)


_OF_CORE = (
    "requests", "compared_requests", "prompt_tokens", "reused_tokens", "reported_tokens", "baseline_tokens",
    "foregone_tokens", "saved_s", "learnt_s", "baseline_s", "evicted_blocks",
)  # fmt: skip
"""The fields of a core's sums, in its order."""
_SUMMED = tuple(name for name in Figures.__struct_fields__ if name != "evicted_blocks")


class Row(Figures, frozen=True, kw_only=True):
    """One name's figures. Up to `missed_requests_max` more requests of this name are counted in `other`.

    A prefix's name is the sequence hash of a block, 16 hexadecimal digits; `title` is the name that the configuration
    gives to it, else empty.
    """

    name: str
    missed_requests_max: int = 0
    title: str = ""


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The names with most requests, and all else together; any name without a row had at most `absent_requests_max`."""

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
    """Decisions, by why they are in no sum; `pending`: their outcome is not known yet."""
    removed_blocks: int | None = None
    """Blocks that ranks removed from their GPUs in the period, whatever caused it; None if `evicted_blocks` is."""


def top_rows(
    found: built.Attribution, dimension: Dimension, titles: Mapping[str, str] | None = None, **named: object
) -> Rows:
    """Return the present sums by name, those with most requests first; `titles` are the titles of names.

    `named`: fields that all rows have, as for `Figures.of`.
    """
    top, other, absent_max = found.top(DIMENSIONS.index(dimension))
    rows = []
    for name, missed, sums in top:
        title = (titles or {}).get(name, "")
        rows.append(Row.of(sums, **named, name=name, missed_requests_max=missed, title=title))
    rest = Figures.of(other, **named)
    return Rows(rows=_by_requests(rows), other=rest, absent_requests_max=absent_max)


def _by_requests(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.requests, row.name)))


def report_of(
    found: built.Attribution,
    source: Source = "router",
    since: str = "",
    until: str = "",
    titles: Mapping[str, str] | None = None,
    *,
    not_repeated: int = 0,
    removed_blocks: int | None = None,
) -> SavingsReport:
    """Return the present report; `titles` names prefix families by their hash.

    `not_repeated`: decisions of a journal that lacks records before them, so that their candidates are not known.
    """
    named = {"evicted_blocks": None} if removed_blocks is None else {}
    not_answered, unseen, dropped, pending = found.not_counted()
    causes = {"not_answered": not_answered, "unseen": unseen, "dropped": dropped, "not_repeated": not_repeated}
    return SavingsReport(
        source=source,
        since=since,
        until=until,
        total=Figures.of(found.total(), **named),
        by={each: top_rows(found, each, titles if each == "prefix" else None, **named) for each in DIMENSIONS},
        not_counted={**causes, "pending": pending},
        removed_blocks=removed_blocks,
    )


def merged(reports: Sequence[SavingsReport]) -> SavingsReport:
    """Return the sum of one or more routers' reports; it keeps `ROWS_MAX` names at most.

    If a name has a row in one report and none in another, its requests may be in the field `other` of the latter: its
    `missed_requests_max` grows by that report's `absent_requests_max`.
    """
    first = reports[0]
    return msgspec.structs.replace(
        first,
        since=min(each.since for each in reports),
        until=max(each.until for each in reports),
        total=_sum(each.total for each in reports),
        by={each: _merged_rows([report.by[each] for report in reports]) for each in DIMENSIONS},
        not_counted={name: sum(each.not_counted[name] for each in reports) for name in first.not_counted},
    )


def _merged_rows(parts: list[Rows]) -> Rows:
    absent_max = sum(part.absent_requests_max for part in parts)
    named = sorted(((row, part) for part in parts for row in part.rows), key=lambda each: each[0].name)
    rows = list[Row]()
    for _, group in groupby(named, key=lambda each: each[0].name):
        found = list(group)
        missed = absent_max - sum(part.absent_requests_max for _, part in found)
        missed += sum(row.missed_requests_max for row, _ in found)
        row = reduce(Row.plus, [row for row, _ in found])
        rows.append(msgspec.structs.replace(row, missed_requests_max=missed))
    ordered = _by_requests(rows)
    kept, cut = ordered[:ROWS_MAX], ordered[ROWS_MAX:]
    absent_max = max([absent_max, *(row.requests + row.missed_requests_max for row in cut)])
    other = _sum([*(part.other for part in parts), *cut])
    return Rows(rows=kept, other=other, absent_requests_max=absent_max)


def _sum(figures: Iterable[Figures]) -> Figures:
    return reduce(Figures.plus, figures)


def report_text(report: SavingsReport, dimensions: Sequence[Dimension] = DIMENSIONS) -> list[str]:
    """Return the lines of the report: the sentences for the total, then a table for each of the dimensions."""
    lines = sentences(report)
    for each in dimensions:
        cells, note = table(report, each)
        lines += ["", *aligned(cells, 1), *([note] if note else [])]
    return lines


def sentences(report: SavingsReport) -> list[str]:
    """Return what there is to say of all requests: the period, the sums, and what is not counted."""
    source = "routers' journals" if report.source == "journal" else "the running router"
    return [
        f"from {report.since or 'the oldest record'} to {report.until}, from {source}",
        *_total(report.total, report.removed_blocks),
        *(f"not counted: {count} decisions {_WHY[why]}" for why, count in report.not_counted.items() if count),
    ]


def _total(total: Figures, removed_blocks: int | None) -> Iterator[str]:
    yield f"{total.requests} requests answered, with {total.prompt_tokens} prompt tokens"
    if not total.requests:
        return
    reported = _parts(total.reported_tokens, total.reused_tokens, "as workers reported", "predicted")
    yield f"reused: {total.reused_tokens} tokens ({_percent(total.reused_tokens, total.prompt_tokens)}); {reported}"
    share = _percent(total.routing_tokens, total.reused_tokens)
    compared = f"{total.compared_requests} requests with compared candidates"
    yield (
        f"due to routing: {total.routing_tokens:.0f} tokens ({share} of the reused): a candidate drawn evenly would"
        f" have reused {total.baseline_tokens:.0f}; of {compared}"
    )
    yield f"foregone: {total.foregone_tokens} tokens, which another candidate held and the chosen one did not"
    learnt = _parts(total.learnt_s, total.saved_s, "by learnt rates", "by the reference engine's")
    yield (
        f"prefill time saved: {_seconds(total.saved_s)} s of a rank, {_seconds(total.routing_s)} s due to routing;"
        f" {learnt}"
    )
    if total.evicted_blocks is not None:
        yield (
            f"evicted: {removed_blocks} blocks by the ranks, {total.evicted_blocks:.0f} of them soon after these"
            " requests came there, and charged to them"
        )


def table(report: SavingsReport, dimension: Dimension) -> tuple[list[tuple[str, ...]], str]:
    """Return the cells of a dimension's table, its heads first, and a note about names that may lack requests."""
    found, has_evictions = report.by[dimension], report.total.evicted_blocks is not None
    columns = list(_COLUMNS.items())[: None if has_evictions else -1]
    named: list[tuple[str, Figures]] = [(_name(dimension, row), row) for row in found.rows]
    named += [("(all others)", found.other)] * bool(found.other.requests)
    cells = [(_TITLES[dimension], *(head for head, _ in columns))]
    cells += [(name, *(cell(figures) for _, cell in columns)) for name, figures in named]
    missed = max((row.missed_requests_max for row in found.rows), default=0)
    if not missed and not found.absent_requests_max:
        return cells, ""
    return cells, (
        f"a row may lack up to {missed} requests of its name, which are among the others;"
        f" a name without a row had {found.absent_requests_max} at most"
    )


def _name(dimension: Dimension, row: Row) -> str:
    name = (row.name if row.name.isprintable() else ascii(row.name)) or _NAMELESS[dimension]
    shown = f"{name} {row.title}" if row.title else name
    return shown if len(shown) <= _NAME_WIDTH else f"{shown[: _NAME_WIDTH - 3]}..."


def _parts(part: float, whole: float, first: str, rest: str) -> str:
    """Return how much of the whole is of the first kind, and how much of the other."""
    if part in (0, whole):
        return f"all {first if part else rest}"
    return f"{_percent(part, whole)} {first}, the rest {rest}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if abs(seconds) >= _LONG_S else f"{seconds:.3f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "REQUESTS": lambda each: str(each.requests),
    "PROMPT": lambda each: str(each.prompt_tokens),
    "REUSED": lambda each: str(each.reused_tokens),
    "HIT%": lambda each: _percent(each.reused_tokens, each.prompt_tokens),
    "ROUTING": lambda each: f"{each.routing_tokens:.0f}",
    "FOREGONE": lambda each: str(each.foregone_tokens),
    "SAVED s": lambda each: _seconds(each.saved_s),
    "ROUTING s": lambda each: _seconds(each.routing_s),
    "EVICTED": lambda each: f"{each.evicted_blocks or 0:.0f}",
}
"""The heads of a table, and what makes their cells; only reports with evictions have the last column."""


def report_page(report: SavingsReport, dimensions: Sequence[Dimension] = DIMENSIONS) -> str:
    """Return the page: the sentences for the total, then a table for each of the dimensions. Names are escaped."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>What reused prompts saved</title><style>{_STYLE}</style></head><body>",
        "<main><h1>What reused prompts saved</h1>",
        *(f"<p>{escape(each[:1].upper() + each[1:])}.</p>" for each in sentences(report)),
    ]
    for each in dimensions:
        (heads, *rows), note = table(report, each)
        lines.append('<div class="scroll" tabindex="0"><table><thead>')
        titles = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
        lines.append(f"<tr>{titles}</tr></thead><tbody>")
        for name, *numbers in rows:
            cells = "".join(f"<td>{escape(number)}</td>" for number in numbers)
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
        lines.append("</tbody></table></div>")
        lines.append(f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>' if note else "")
    return "\n".join([*lines, "</main></body></html>"])
