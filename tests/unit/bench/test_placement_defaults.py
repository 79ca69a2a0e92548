"""Mode kv as it is by default, in the two regimes where what a rank did before must not outweigh what it does now."""

import pytest

from bench.placement.regimes import CACHES, LOADS, REGIMES
from bench.placement.report import Cell, Place, PlacementGrid, play

GRID = PlacementGrid()


def share(regime: str, load: float, cache: str) -> float:
    """Return the share that the regime checks."""
    checked = play(GRID, Cell(Place(regime, load, cache), "kv", GRID.seed)).checked
    assert checked is not None
    return checked


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("load", LOADS)
def test_a_rank_that_computed_one_long_prompt_gets_its_part_of_the_600_short_ones_that_follow(
    load: float, cache: str
) -> None:
    even = 1 / REGIMES["one long prompt"].workers
    assert even / 2 < share("one long prompt", load, cache) < even * 1.5


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("load", LOADS)
def test_after_a_restart_no_rank_gets_all_of_the_next_480_requests(load: float, cache: str) -> None:
    assert 0.0 < share("restart", load, cache) < 1.0
