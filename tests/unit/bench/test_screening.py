"""Means of series, and how sure they are."""

import random

import pytest

from bench.what_if.series import BATCHES, Series

# ------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_of_a_mean_has_the_mean_of_independent_values(seed: int) -> None:
    draw, series = random.Random(seed), Series()
    for _ in range(20_000):
        series.add(draw.gauss(3.0, 1.0))
    found = series.mean()
    assert found.standard_error is not None
    assert found.standard_error == pytest.approx(1 / 20_000**0.5, rel=0.5), f"seed {seed}"
    assert abs(found.mean - 3.0) < 4 * found.standard_error, f"seed {seed}"


def test_values_that_hang_together_have_a_wider_interval_than_their_number_says() -> None:
    draw, series = random.Random(1), Series()
    for _ in range(200):
        level = draw.gauss(0.0, 1.0)
        for _ in range(100):
            series.add(level)
    found = series.mean().standard_error
    assert found is not None
    assert found > 5 / 20_000**0.5


def test_few_values_have_no_interval() -> None:
    series = Series()
    for _ in range(BATCHES - 1):
        series.add(1.0)
    assert series.mean().interval is None
    series.add(1.0)
    assert series.mean().interval == (1.0, 1.0)
