"""What the index bench says of its figures: a table for each group of cells, and the targets at scale 1.

trace      at least 10 times the peer with buffers, 6 times with lists
match      12 times the peer on a staircase of 512 with buffers; with lists 1.5 times in every cell
events     with buffers: stored 64 blocks 12 times the peer, 1 block 25 times; removed 64 blocks 8 times
memory     at most 0.45 of the peer's at one holder, 0.1 at 16
answers    all of the trace's right
"""

from collections.abc import Iterator

from bench.index.plan import GROUPS, OURS
from bench.tables import FigureTable, Rounds, Verdict, at_least, at_most, number, times

_SEATS = (*OURS, "peer", "floor")
_UNITS = {
    "events": "CPU ns a block",
    "match": "CPU ns",
    "trace": "CPU ns a block",
    "memory": "bytes a unique block",
    "bulk": "CPU ns, bytes a block",
}
_TARGETS = (
    ("trace", "trace", "buffers", 10.0),
    ("trace", "trace", "lists", 6.0),
    ("match, staircase", "match", "buffers", 12.0),
    ("match", "match", "lists", 1.5),
    ("events", "stored 64", "buffers", 12.0),
    ("events", "stored 1", "buffers", 25.0),
    ("events", "removed 64", "buffers", 8.0),
)
"""Cells by their beginning, a figure, our seat, and at least how many times its time the peer needs."""


def tables(found: Rounds) -> list[FigureTable]:
    """Return a table for each group that was measured: medians by seat, and the peer's over ours with buffers."""
    groups = [group for group in GROUPS if found.cells(group)]
    columns = ("cell", "figure", *_SEATS, "peer / buffers", "peer / lists")
    return [FigureTable(f"{group}, {_UNITS[group]}", columns, list(_rows(found, group))) for group in groups]


def _rows(found: Rounds, group: str) -> Iterator[tuple[str, ...]]:
    for cell in found.cells(group):
        for name in dict.fromkeys(
            name for seat in _SEATS for each in found.rounds.get((seat, cell), ()) for name in each
        ):
            ratios = (times(found.ratio(cell, name, "peer", seat)) for seat in OURS[:2])
            yield (cell, name, *(number(found.figure(seat, cell, name)) for seat in _SEATS), *ratios)


def verdicts(found: Rounds) -> list[Verdict]:
    """Return the verdict on every target."""
    judged = [
        at_least(
            f"{beginning}, {name}, {seat}: the peer's time over ours",
            needed,
            [(cell, found.ratio(cell, name, "peer", seat)) for cell in found.cells(beginning)],
        )
        for beginning, name, seat, needed in _TARGETS
    ]
    for cell, most in (("memory, holders 1", 0.45), ("memory, holders 16", 0.1)):
        judged.append(
            at_most(f"{cell}: ours over the peer's", most, [("", found.ratio(cell, "resident", "buffers", "peer"))])
        )
    answers = [
        (f"{cell} ({seat})", found.figure(seat, cell, "wrong"))
        for cell in found.cells("trace, answers")
        for seat in OURS
    ]
    return [*judged, at_most("wrong answers", 0, answers, "")]
