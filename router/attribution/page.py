"""The report as one HTML page, without scripts and without anything from elsewhere. Pure."""

from collections.abc import Iterator, Sequence
from html import escape

from router.attribution.attribution import DIMENSIONS, Dimension
from router.attribution.contents import SavingsReport
from router.attribution.text import sentences, table

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
