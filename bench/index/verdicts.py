"""The targets of the index at scale 1, and whether they are reached. Source: `docs/BENCHMARKS.md`.

trace      at least 10 times the peer with buffers, 6 times with lists and dicts
match      hot, with buffers: within 5 times of comparing the bytes (at depth 2048), 12 times the peer on a staircase
           of 512; with lists and dicts: 1.5 times the peer in every cell
events     stored 64 blocks: 12 times the peer, 1 block: 25 times; removed 64 blocks: 8 times; stored 512 blocks: within
           1.5 times of the machine's random read-modify-write of a table as large as the index, where ranks registered
           their capacity
memory     at most 0.45 of the peer's at one holder, 0.1 at 16
exact      every answer right
control    one index in two seats differs by less than noise; no match beats the comparison of its bytes
"""

from collections.abc import Iterator
from typing import NamedTuple

from bench.index.exact import SCENARIOS
from bench.index.plan import DEPTHS, UNSIZED
from bench.index.results import IndexResults

NOISE = 1.25
_PEER_OVER_BUFFERS, _PEER_OVER_LISTS, _BUFFERS_OVER_PEER = ("peer", "buffers"), ("peer", "lists"), ("buffers", "peer")


class Judged(NamedTuple):
    """One figure, and whether it meets the target."""

    cell: str
    measured: float
    holds: bool


class IndexVerdict(NamedTuple):
    """One target: `sign` `needed`, in the unit `unit`, and every cell it covers."""

    target: str
    sign: str
    needed: float
    unit: str
    judged: tuple[Judged, ...]

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached in all cells; None where nothing was measured."""
        return all(each.holds for each in self.judged) if self.judged else None


Figure = tuple[str, float | None]


def verdicts(results: IndexResults) -> list[IndexVerdict]:
    """Return the verdict on every target."""
    return [
        *_trace(results),
        *_match(results),
        *_events(results),
        *_memory(results),
        *_exact(results),
        *_control(results),
    ]


def _at_least(target: str, needed: float, figures: Iterator[Figure]) -> IndexVerdict:
    judged = tuple(Judged(cell, each, each >= needed) for cell, each in figures if each is not None)
    return IndexVerdict(target, ">=", needed, "x", judged)


def _at_most(target: str, needed: float, figures: Iterator[Figure], unit: str = "x") -> IndexVerdict:
    judged = tuple(Judged(cell, each, each <= needed) for cell, each in figures if each is not None)
    return IndexVerdict(target, "<=", needed, unit, judged)


def _ratios(
    results: IndexResults, group: str, cells: list[str], section: str, seats: tuple[str, str]
) -> Iterator[Figure]:
    return ((cell, results.ratio(group, cell, section, seats)) for cell in cells)


def _above_floor(
    results: IndexResults, group: str, cells: list[str], section: str, seats: tuple[str, str]
) -> Iterator[Figure]:
    """Yield ratios to the peer, each with the share of the peer's time that an empty answer takes."""
    for cell in cells:
        floor = results.ratio(group, cell, section, ("floor", "peer"))
        label = cell if floor is None else f"{cell}, the peer's floor {floor:.0%} of its time"
        yield label, results.ratio(group, cell, section, seats)


def _trace(results: IndexResults) -> Iterator[IndexVerdict]:
    for target, needed, seats in (
        ("trace replay, buffers: the peer's time over ours", 10, _PEER_OVER_BUFFERS),
        ("trace replay, lists and dicts: the peer's time over ours", 6, _PEER_OVER_LISTS),
    ):
        yield _at_least(target, needed, _above_floor(results, "trace", ["trace"], "trace", seats))


def _match(results: IndexResults) -> Iterator[IndexVerdict]:
    cells = results.cells("match")
    deepest = [cell for cell in cells if cell.startswith(f"depth {DEPTHS[-1]},")]
    stairs = [cell for cell in cells if cell.startswith("staircase")]
    over_limit = ((cell, _over_limit(results, "match", cell, "match")) for cell in deepest)
    yield _at_most("match, hot, buffers: our time over comparing the bytes", 5, over_limit)
    target = "match, staircase, buffers: the peer's time over ours"
    yield _at_least(target, 12, _above_floor(results, "match", stairs, "match", _PEER_OVER_BUFFERS))
    target = "match, lists and dicts: the peer's time over ours"
    yield _at_least(target, 1.5, _above_floor(results, "match", cells, "match", _PEER_OVER_LISTS))


def _events(results: IndexResults) -> Iterator[IndexVerdict]:
    cells = results.cells("events")
    for section, needed in (("stored 64", 12), ("stored 1", 25), ("removed 64", 8)):
        figures = _ratios(results, "events", cells, section, _PEER_OVER_BUFFERS)
        yield _at_least(f"{section}, buffers: the peer's time over ours", needed, figures)
    sized = (cell for cell in results.cells("bulk") if not cell.endswith(UNSIZED))
    large = (("events", "large index", "stored 512"), *(("bulk", cell, "stored") for cell in sized))
    over_limit = ((cell, _over_limit(results, group, cell, section)) for group, cell, section in large)
    yield _at_most("stored 512, buffers: our time over a random read-modify-write", 1.5, over_limit)


def _memory(results: IndexResults) -> Iterator[IndexVerdict]:
    for cell, needed in (("1 holder", 0.45), ("16 holders", 0.1)):
        figures = _ratios(results, "memory", [cell], "resident", _BUFFERS_OVER_PEER)
        yield _at_most(f"bytes a unique block, {cell}: ours over the peer's", needed, figures)


def _exact(results: IndexResults) -> Iterator[IndexVerdict]:
    figures = ((f"{cell} ({seat})", _wrong(results, cell, seat)) for cell, seat in _answers(results))
    yield _at_most("exact: wrong answers", 0, figures, unit="")


def _answers(results: IndexResults) -> Iterator[tuple[str, str]]:
    cells = [*results.cells("exact"), *(cell for cell in results.cells("trace") if cell == "trace answers")]
    return ((cell, seat) for cell in cells for seat in ("buffers", "messages"))


def _wrong(results: IndexResults, cell: str, seat: str) -> float | None:
    group = "trace" if cell == "trace answers" else "exact"
    if cell not in SCENARIOS:
        return results.count(group, cell, seat, "wrong")  # of all rounds: a median would forgive some
    depth = results.figure(group, cell, seat, "depth")
    return None if depth is None else float(depth != SCENARIOS[cell].depth)


def _control(results: IndexResults) -> Iterator[IndexVerdict]:
    ratio = results.ratio("control", "the same index twice", "match", ("twin", "buffers"))
    either = None if ratio is None else max(ratio, 1 / ratio)
    yield _at_most("control: the same index twice", NOISE, iter([("in two processes", either)]))
    over_limit = ((cell, _over_limit(results, "match", cell, "match")) for cell in results.cells("match"))
    yield _at_least("control: no match is faster than comparing its bytes", 1, over_limit)


def _over_limit(results: IndexResults, group: str, cell: str, section: str) -> float | None:
    ours, limit = (results.figure(group, cell, "buffers", each) for each in (section, "limit"))
    return ours / limit if ours and limit else None
