"""How much a search draws: all of it at night, a quarter every day."""

from hypothesis import settings

EVERY_DAY = "every-day"
"""The profile of Hypothesis under which a search draws a quarter; `make nightly` names `default`."""


def examples(nightly: int, least: int = 25) -> int:
    """Return how many of a search's `nightly` examples or seeds to run now: all, or a quarter and at least `least`."""
    is_night = settings.get_current_profile_name() != EVERY_DAY
    return nightly if is_night else min(nightly, max(least, nightly // 4))
