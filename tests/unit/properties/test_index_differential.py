"""The native index and the reference agree on seeded scenarios, drained to nothing in the end.

One seed again: `KVROUTER_INDEX_SEED=123 pytest tests/unit/properties/test_index_differential.py`.
"""

import os

import pytest

from tests.contract.indexes import IMPLEMENTATIONS
from tests.support.amount import examples
from tests.unit.properties.index_collisions import run_collisions
from tests.unit.properties.index_scenario import run
from tests.unit.properties.index_world import FAMILIES

SCENARIOS = examples(264)
PARTS = 10
SEED = os.environ.get("KVROUTER_INDEX_SEED")


def seeds(part: int, parts: int) -> list[int]:
    """Return every `parts`-th seed; where one is asked for, that one if it belongs to the part."""
    return [seed for seed in ([int(SEED)] if SEED else range(SCENARIOS)) if seed % parts == part]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_implementations_agree_on_forests(family: str) -> None:
    for seed in seeds(list(FAMILIES).index(family), len(FAMILIES)):
        run(seed, IMPLEMENTATIONS)


@pytest.mark.parametrize("part", range(PARTS))
def test_all_implementations_agree_on_what_contradicts_itself(part: int) -> None:
    for seed in seeds(part, PARTS):
        run_collisions(seed, IMPLEMENTATIONS)
