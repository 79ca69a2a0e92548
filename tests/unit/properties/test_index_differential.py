"""The native index and the reference agree on seeded scenarios, drained to nothing in the end.

One seed again: `KVROUTER_INDEX_SEED=123 pytest tests/unit/properties/test_index_differential.py`.
"""

import os

import pytest

from tests.contract.indexes import IMPLEMENTATIONS
from tests.unit.properties.index_collisions import run_collisions
from tests.unit.properties.index_scenario import run
from tests.unit.properties.index_world import FAMILIES

SCENARIOS, SCENARIOS_SLOW = 66, 264
PARTS = 10
SEED = os.environ.get("KVROUTER_INDEX_SEED")


def seeds(part: int, parts: int, first: int, stop: int) -> list[int]:
    """Return every `parts`-th seed; where one is asked for, that one if it belongs to the part."""
    if SEED is not None:
        first, stop = int(SEED), int(SEED) + 1
    return [seed for seed in range(first, stop) if seed % parts == part]


def of_family(family: str, first: int, stop: int) -> list[int]:
    return seeds(list(FAMILIES).index(family), len(FAMILIES), first, stop)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_implementations_agree_on_forests(family: str) -> None:
    for seed in of_family(family, 0, SCENARIOS):
        run(seed, IMPLEMENTATIONS)


@pytest.mark.parametrize("part", range(PARTS))
def test_all_implementations_agree_on_what_contradicts_itself(part: int) -> None:
    for seed in seeds(part, PARTS, 0, SCENARIOS):
        run_collisions(seed, IMPLEMENTATIONS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_implementations_agree_on_forests_on_many_more(family: str) -> None:
    for seed in of_family(family, SCENARIOS, SCENARIOS_SLOW):
        run(seed, IMPLEMENTATIONS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_implementations_agree_on_many_more_contradictions(part: int) -> None:
    for seed in seeds(part, PARTS, SCENARIOS, SCENARIOS_SLOW):
        run_collisions(seed, IMPLEMENTATIONS)
