"""The names of what a router sums up of its requests' savings: `router/native/attribution.hpp` has the rules."""

from typing import Literal, NamedTuple

from router.native import built

Dimension = Literal["model", "tenant", "lora", "prefix"]
DIMENSIONS: tuple[Dimension, ...] = ("model", "tenant", "lora", "prefix")


ROWS_MAX = 64
"""Names with a row of their own in each dimension: as many as a reader or a dashboard takes in."""


class AttributionLimits(NamedTuple):
    """How many names have rows of their own in each dimension, and which block of a prompt names its family.

    `pending_max`: largest number of decisions without an outcome.
    """

    rows_max: int = ROWS_MAX
    family_blocks: int = 4
    pending_max: int = 65_536


class Sums(NamedTuple):
    """What some requests saved together, in tokens and in seconds of their ranks.

    compared_requests    requests whose candidates were compared
    reported_tokens      the part of `reused_tokens` that workers reported; the rest was predicted
    learnt_s             the part of `saved_s` that is computed with a learnt factor
    """

    requests: int
    compared_requests: int
    prompt_tokens: int
    reused_tokens: int
    reported_tokens: int
    baseline_tokens: float
    foregone_tokens: int
    saved_s: float
    learnt_s: float
    baseline_s: float
    evicted_blocks: float


class NamedRow(NamedTuple):
    """One name's sums since its row began; before, the name had `missed` requests at most."""

    name: str
    missed: int
    sums: Sums


class TopRows(NamedTuple):
    """The names with most requests, in that order, by name where equal, and all else together.

    A name without a row had `absent_max` requests at most.
    """

    rows: list[NamedRow]
    other: Sums
    absent_max: int


def top_rows(found: built.Attribution, dimension: Dimension) -> TopRows:
    """Return the present sums by name."""
    rows, other, absent_max = found.top(DIMENSIONS.index(dimension))
    named = [NamedRow(name, missed, Sums(*sums)) for name, missed, sums in rows]
    return TopRows(sorted(named, key=lambda row: (-row.sums.requests, row.name)), Sums(*other), absent_max)


def not_counted(found: built.Attribution, not_repeated: int = 0) -> dict[str, int]:
    """Return the number of decisions that are in no sum, by cause.

    `not_repeated`: those of a journal that lacks records before them, so that their candidates are not known.
    """
    not_answered, unseen, dropped, pending = found.not_counted()
    causes = {"not_answered": not_answered, "unseen": unseen, "dropped": dropped, "not_repeated": not_repeated}
    return {**causes, "pending": pending}
