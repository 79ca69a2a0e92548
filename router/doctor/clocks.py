"""How far another host's clock is from ours, by the `Date` of its HTTP answers.

    sent at a, answered at b (our clock), Date D     its clock was in [D, D + 2) at some moment of [a, b]
    ahead of ours by                                 at least D - b, less than D + 2 - a
    several answers of one host                      all of these bounds hold
    two hosts                                        one is ahead of the other by at least least_1 - most_2

2 s: `Date` has whole seconds, and servers reuse its text for up to another second. Source: RFC 9110, section 6.6.1
(IMF-fixdate); encode/uvicorn `uvicorn/server.py` (`on_tick`: once a second).
"""

from collections.abc import Iterable, Iterator
from itertools import permutations

import msgspec

from router.doctor.findings import Finding, names

DATE_RESOLUTION_S = 2.0
SKEW_MAX_S = 1.0
"""Beyond the uncertainty. Half of a noticeable freshness (2 s), which is measured across two clocks."""


class ClockReading(msgspec.Struct, frozen=True):
    """`of` is ahead of our clock by `least_s` to `most_s` seconds; behind, where they are negative."""

    of: str
    least_s: float
    most_s: float


def reading(of: str, date_s: float, sent_s: float, answered_s: float) -> ClockReading:
    """Return the reading of one `Date`; seconds since 1970, the latter two by our clock."""
    return ClockReading(of, date_s - answered_s, date_s + DATE_RESOLUTION_S - sent_s)


def narrowed(readings: Iterable[ClockReading]) -> tuple[ClockReading, ...]:
    """Return one reading per host; of two contradictory ones the later counts: the clock was set."""
    found: dict[str, ClockReading] = {}
    for each in readings:
        known = found.get(each.of, each)
        both = ClockReading(each.of, max(known.least_s, each.least_s), min(known.most_s, each.most_s))
        found[each.of] = both if both.least_s <= both.most_s else each
    return tuple(found.values())


def clock_findings(readings: Iterable[ClockReading]) -> Iterator[Finding]:
    """Yield hosts with a clock that differs from ours, and pairs that agree with ours and not with each other."""
    every = narrowed(readings)
    off = [each for each in every if _skew_s(each) > SKEW_MAX_S]
    resolution = f"({DATE_RESOLUTION_S:g} s are uncertain)"
    if len(off) == len(every) > 1:
        yield Finding("clock.skew", "this machine", f"all {len(every)} hosts differ from it: {_text(off)} {resolution}")
        return
    for each in off:
        yield Finding("clock.skew", each.of, f"it is {_words(each)} this machine {resolution}")
    near = [each for each in every if each not in off]
    for one, other in permutations(near, 2):
        if (apart_s := one.least_s - other.most_s) > SKEW_MAX_S:
            yield Finding("clock.skew", one.of, f"it is {apart_s:.1f} s or more ahead of {other.of} {resolution}")


def _skew_s(each: ClockReading) -> float:
    """Return the smallest difference of the clock from ours, in either direction."""
    return max(each.least_s, -each.most_s, 0.0)


def _words(each: ClockReading) -> str:
    return f"{_skew_s(each):.1f} s or more {'ahead of' if each.least_s > 0 else 'behind'}"


def _text(every: list[ClockReading]) -> str:
    return names([f"{each.of} {_words(each)} it" for each in every])
