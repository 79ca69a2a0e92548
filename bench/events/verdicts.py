"""The targets of the event plane, and whether they are reached. Source: `docs/BENCHMARKS.md`.

freshness   engine's flush to applied: p50 <= 5 ms, p99 <= 50 ms, at every rate, and while requests flow
cold start  of a million held blocks from a snapshot: caught up, and every rank proven, within 3 s
control     no lag is less than that of a bare message, and no path takes more blocks than a bare publication
"""

from collections.abc import Iterable

from bench.events.results import EventResults
from bench.index.verdicts import IndexVerdict, Judged

_P50_MS, _P99_MS, _COLD_S = 5, 50, 3
Figure = tuple[str, float]


def verdicts(results: EventResults) -> list[IndexVerdict]:
    """Return the verdict on every target, and on the controls."""
    fresh, through = [cell for cell in results.freshness or () if cell.is_ours], results.throughput or []
    starts = results.cold.starts[:1] if results.cold else []
    return [
        _at_most("engine's flush to applied, p50", _P50_MS, " ms", ((cell.name, cell.age.p50_ms) for cell in fresh)),
        _at_most("engine's flush to applied, p99", _P99_MS, " ms", ((cell.name, cell.age.p99_ms) for cell in fresh)),
        _at_most("cold start, caught up", _COLD_S, " s", ((f"from {each.name}", each.caught_up_s) for each in starts)),
        _at_most("cold start, all proven", _COLD_S, " s", ((f"from {each.name}", each.proven_s) for each in starts)),
        _at_least(
            "control: no median lag is less than a bare message's",
            ((cell.name, cell.age.p50_ms / cell.bare.p50_ms) for cell in fresh),
        ),
        _at_least(
            "control: no path is faster than a bare publication",
            ((f"events of {cell.event_blocks}", cell.bare_blocks_s / cell.blocks_s) for cell in through),
        ),
    ]


def _at_most(target: str, needed: float, unit: str, figures: Iterable[Figure]) -> IndexVerdict:
    return IndexVerdict(target, "<=", needed, unit, tuple(Judged(cell, each, each <= needed) for cell, each in figures))


def _at_least(target: str, figures: Iterable[Figure]) -> IndexVerdict:
    return IndexVerdict(target, ">=", 1, "x", tuple(Judged(cell, each, each >= 1) for cell, each in figures))
