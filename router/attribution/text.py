"""The report for people: what was reused, what of it is due to routing, and for whom; as text, and as one HTML page.

The page has no scripts, and nothing from elsewhere. Pure.
"""

from collections.abc import Iterator, Sequence
from html import escape

from router.attribution.contents import DIMENSIONS, Dimension, Figures, Row, SavingsReport

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
_COLUMNS = ("REQUESTS", "PROMPT", "REUSED", "HIT%", "ROUTING", "FOREGONE", "SAVED s", "ROUTING s")
_EVICTED = "EVICTED"
_WHY = {
    "not_answered": "that failed, were cancelled or were refused at the worker (after some, another one answered)",
    "unseen": "on a prompt that was not encoded: embeddings, or the mode reads no overlap and tokens.always is false",
    "dropped": "with an outcome that came too late",
    "not_repeated": "of which the journal lacks records before the decision",
    "pending": "that are not over",
}
_NAME_WIDTH = 40
_LONG_S = 10.0


def report_text(report: SavingsReport, dimensions: Sequence[Dimension] = DIMENSIONS) -> list[str]:
    """Return the lines of the report: the sentences for the total, then a table for each of the dimensions."""
    lines = sentences(report)
    for each in dimensions:
        cells, note = table(report, each)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines.append("")
        lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
        lines += [note] if note else []
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
    cells = [(_TITLES[dimension], *((*_COLUMNS, _EVICTED) if has_evictions else _COLUMNS))]
    cells += [(_name(dimension, row), *_cells(row)) for row in found.rows]
    if found.other.requests:
        cells.append(("(all others)", *_cells(found.other)))
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


def _cells(figures: Figures) -> tuple[str, ...]:
    cells = (
        str(figures.requests),
        str(figures.prompt_tokens),
        str(figures.reused_tokens),
        _percent(figures.reused_tokens, figures.prompt_tokens),
        f"{figures.routing_tokens:.0f}",
        str(figures.foregone_tokens),
        _seconds(figures.saved_s),
        _seconds(figures.routing_s),
    )
    return cells if figures.evicted_blocks is None else (*cells, f"{figures.evicted_blocks:.0f}")


def _parts(part: float, whole: float, first: str, rest: str) -> str:
    """Return how much of the whole is of the first kind, and how much of the other."""
    if part in (0, whole):
        return f"all {first if part else rest}"
    return f"{_percent(part, whole)} {first}, the rest {rest}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if abs(seconds) >= _LONG_S else f"{seconds:.3f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def report_page(report: SavingsReport, dimensions: Sequence[Dimension] = DIMENSIONS) -> str:
    """Return the page: the sentences for the total, then a table for each of the dimensions. Names are escaped."""
    return "\n".join(_lines(report, dimensions))


def _lines(report: SavingsReport, dimensions: Sequence[Dimension]) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    yield f"<title>What reused prompts saved</title><style>{_STYLE}</style></head><body>"
    yield "<main><h1>What reused prompts saved</h1>"
    yield from (f"<p>{escape(each[:1].upper() + each[1:])}.</p>" for each in sentences(report))
    for each in dimensions:
        cells, note = table(report, each)
        yield '<div class="scroll" tabindex="0"><table><thead>'
        heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells[0])
        yield f"<tr>{heads}</tr></thead><tbody>"
        yield from map(_row, cells[1:])
        yield "</tbody></table></div>"
        yield f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>' if note else ""
    yield "</main></body></html>"


def _row(cells: tuple[str, ...]) -> str:
    name, *numbers = map(escape, cells)
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{each}</td>" for each in numbers)}</tr>'
