"""The figures of the index bench as tables: rows of text, to be printed or written as Markdown."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.index.exact import SCENARIOS
from bench.index.plan import OURS
from bench.index.results import WALL, IndexResults

NONE = "-"
"""Stands for what was not measured."""


class FigureTable(NamedTuple):
    """A title with the unit of its figures, the columns, of which the first is text, and the rows."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(results: IndexResults) -> list[FigureTable]:
    """Return all tables that have rows."""
    made = (_events, _match, _trace, _memory, _bulk, _exact, _hash, _machine, _control)
    return [table for make in made if (table := make(results)).rows]


def _events(results: IndexResults) -> FigureTable:
    columns = ("index", "event", *OURS, "peer", "peer / buffers", "peer / lists", "peer / messages", "machine")
    return FigureTable("events, CPU ns a block", columns, list(_event_rows(results)))


def _event_rows(results: IndexResults) -> Iterator[tuple[str, ...]]:
    for cell in results.cells("events"):
        limit = results.figure("events", cell, "buffers", "limit")
        sections = [each for each in results.sections("events", cell) if each != "limit"]
        for section in sorted(sections, key=lambda each: each.startswith("removed")):
            figures = (number(results.figure("events", cell, seat, section)) for seat in (*OURS, "peer"))
            ratios = (times(results.ratio("events", cell, section, ("peer", seat))) for seat in OURS)
            yield (cell, section, *figures, *ratios, number(limit))


def _match(results: IndexResults) -> FigureTable:
    columns = ("prefix", "buffers", "lists", "peer", "floor", "peer / buffers", "peer / lists", "machine", "/ machine")
    rows = [_match_row(results, group, cell) for group in ("match", "cold") for cell in results.cells(group)]
    return FigureTable("match, CPU us", columns, rows)


def _match_row(results: IndexResults, group: str, cell: str) -> tuple[str, ...]:
    figures = (
        number(results.figure(group, cell, seat, "match"), 1e3) for seat in ("buffers", "lists", "peer", "floor")
    )
    ratios = (times(results.ratio(group, cell, "match", ("peer", seat))) for seat in ("buffers", "lists"))
    limit, ours = (results.figure(group, cell, "buffers", each) for each in ("limit", "match"))
    return (cell, *figures, *ratios, number(limit, 1e3), times(ours / limit if ours and limit else None))


def _trace(results: IndexResults) -> FigureTable:
    columns = ("index", "total CPU s", "wall s", "million blocks/s", "peer / ours", "answers", "wrong")
    seats = (*OURS, "peer", "floor") if results.cells("trace") else ()
    return FigureTable("trace replay", columns, [_trace_row(results, seat) for seat in seats])


def _trace_row(results: IndexResults, seat: str) -> tuple[str, ...]:
    each_ns = results.figure("trace", "trace", seat, "trace")
    answers = (results.count("trace", "trace answers", seat, each) for each in ("answers", "wrong"))
    return (
        seat,
        number(results.total("trace", "trace", seat, "trace"), 1e9),
        number(results.total("trace", "trace", seat, "trace", WALL), 1e9),
        number(1e3 / each_ns if each_ns else None),
        times(results.ratio("trace", "trace", "trace", ("peer", seat))),
        *(NONE if each is None else f"{each:,}" for each in answers),
    )


def _memory(results: IndexResults) -> FigureTable:
    columns = ("held by", "ours, resident", "ours, as it says", "peer, resident", "ours / peer")
    rows = [
        (
            cell,
            number(results.figure("memory", cell, "buffers", "resident")),
            number(results.figure("memory", cell, "buffers", "told") or None),
            number(results.figure("memory", cell, "peer", "resident")),
            times(results.ratio("memory", cell, "resident", ("buffers", "peer"))),
        )
        for cell in results.cells("memory")
    ]
    return FigureTable("memory, bytes a unique block", columns, rows)


def _bulk(results: IndexResults) -> FigureTable:
    columns = (
        "index",
        "",
        "build, s",
        "ns a block",
        "bytes a block",
        "as it says",
        "cold match, us",
        "stored 512, ns",
        "machine, ns",
    )
    rows = [_bulk_row(results, cell, seat) for cell in results.cells("bulk") for seat in ("buffers", "peer")]
    return FigureTable("very many blocks, CPU", columns, [row for row in rows if row[2] != NONE])


def _bulk_row(results: IndexResults, cell: str, seat: str) -> tuple[str, ...]:
    def figure(section: str, divisor: float = 1.0) -> str:
        return number(results.figure("bulk", cell, seat, section) or None, divisor)  # 0: not known

    build = number(results.total("bulk", cell, seat, "build"), 1e9)
    sizes = (figure("build"), figure("resident"), figure("told"))
    return (cell, seat, build, *sizes, figure("match", 1e3), figure("stored"), figure("limit"))


def _exact(results: IndexResults) -> FigureTable:
    seats = ("buffers", "messages", "peer")
    rows = [(cell, _truth(cell), *(_answer(results, cell, seat) for seat in seats)) for cell in results.cells("exact")]
    return FigureTable("exactness: blocks answered (events not accepted)", ("after", "right", *seats), rows)


def _truth(cell: str) -> str:
    return str(SCENARIOS[cell].depth) if cell in SCENARIOS else "0 wrong"


def _answer(results: IndexResults, cell: str, seat: str) -> str:
    section = "depth" if cell in SCENARIOS else "wrong"
    found, errors = (results.count("exact", cell, seat, each) for each in (section, "errors"))
    if found is None:
        return NONE
    of = f" wrong of {results.count('exact', cell, seat, 'answers')}" if section == "wrong" else ""
    return f"{found}{of} ({errors})" if errors else f"{found}{of}"


def _hash(results: IndexResults) -> FigureTable:
    columns = ("prompt", "native", "Python", "peer (without the chain)")
    rows = [
        (cell, *(number(results.figure("hash", cell, seat, "hash"), 1e3) for seat in ("buffers", "lists", "peer")))
        for cell in results.cells("hash")
    ]
    return FigureTable("hashing, CPU us", columns, rows)


def _machine(results: IndexResults) -> FigureTable:
    rows = [(cell, number(results.figure("machine", cell, "machine", "limit"))) for cell in results.cells("machine")]
    return FigureTable("what the machine allows", ("", "ns"), rows)


def _control(results: IndexResults) -> FigureTable:
    seats = ("buffers", "twin", "lists", "peer")
    rows = [
        (cell, *(number(results.figure("control", cell, seat, section), 1e3) for seat in seats))
        for cell in results.cells("control")
        for section in results.sections("control", cell)
        if section != "limit"
    ]
    return FigureTable("controls, in which nothing is to be won: CPU us a call", ("", *seats), rows)


def number(value: float | None, divisor: float = 1.0) -> str:
    """Return a figure with three significant digits, or the text for a missing one."""
    if value is None:
        return NONE
    value /= divisor
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - the third digit


def times(ratio: float | None) -> str:
    """Return a ratio as such."""
    return NONE if ratio is None else f"{number(ratio)}x"
