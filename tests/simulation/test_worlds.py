"""Whatever goes wrong between engines, log, indexes and routers: nothing is invented, and in the end all is known."""

import pytest

from tests.simulation.seeds import NIGHTLY_SEEDS, TEST_SEEDS, failure

AT_ONCE = 25


@pytest.mark.slow
@pytest.mark.parametrize("first", range(TEST_SEEDS, TEST_SEEDS + NIGHTLY_SEEDS, AT_ONCE))
def test_in_the_end_all_is_known_and_nothing_is_promised_with_many_more_seeds(first: int) -> None:
    assert list(filter(None, map(failure, range(first, first + AT_ONCE)))) == []
