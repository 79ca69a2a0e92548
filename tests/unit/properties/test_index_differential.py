"""The native index, the reference and a naive model agree on seeded scenarios, drained to nothing in the end.

One seed again: `KVROUTER_INDEX_SEED=123 pytest tests/unit/properties/test_index_differential.py`.
"""

import os
from collections.abc import Callable

import pytest

from indexer.index.reference import ReferenceIndex
from tests.contract.indexes import IMPLEMENTATIONS
from tests.unit.properties.index_collisions import run_collisions
from tests.unit.properties.index_scenario import Voices, run
from tests.unit.properties.index_world import FAMILIES
from tests.unit.properties.planted_answers import PLANTED_CONTRADICTIONS, PLANTED_IN_THE_WHOLE

SCENARIOS, SCENARIOS_SLOW = 66, 264
SEARCHED = 330
"""Scenarios in which a planted bug must show."""
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
def test_all_implementations_agree_with_the_model(family: str) -> None:
    for seed in of_family(family, 0, SCENARIOS):
        run(seed, IMPLEMENTATIONS)


@pytest.mark.parametrize("part", range(PARTS))
def test_all_implementations_agree_on_what_contradicts_itself(part: int) -> None:
    for seed in seeds(part, PARTS, 0, SCENARIOS):
        run_collisions(seed, IMPLEMENTATIONS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_implementations_agree_with_the_model_on_many_more(family: str) -> None:
    for seed in of_family(family, SCENARIOS, SCENARIOS_SLOW):
        run(seed, IMPLEMENTATIONS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_implementations_agree_on_many_more_contradictions(part: int) -> None:
    for seed in seeds(part, PARTS, SCENARIOS, SCENARIOS_SLOW):
        run_collisions(seed, IMPLEMENTATIONS)


# ------------------------------------------------------------------------------------------------- planted bugs


def failing_seed(play: Callable[[int, Voices], None], voices: Voices) -> int | None:
    """Return the first seed whose scenario fails."""
    for seed in range(SEARCHED):
        try:
            play(seed, voices)
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("planted", PLANTED_IN_THE_WHOLE)
@pytest.mark.planted
def test_a_scenario_fails_on_a_planted_bug(planted: type[ReferenceIndex]) -> None:
    assert failing_seed(run, {"planted": planted}) is not None


@pytest.mark.parametrize("planted", [*PLANTED_CONTRADICTIONS, *PLANTED_IN_THE_WHOLE[:6]])
@pytest.mark.planted
def test_a_contradiction_fails_on_a_planted_bug(planted: type[ReferenceIndex]) -> None:
    assert failing_seed(run_collisions, {"python": ReferenceIndex, "planted": planted}) is not None


def test_what_fails_names_its_seed() -> None:
    with pytest.raises(AssertionError) as failed:
        run(0, {"planted": PLANTED_IN_THE_WHOLE[0]})
    assert any("seed 0, family 'holes'" in note for note in failed.value.__notes__)
    with pytest.raises(AssertionError) as failed:
        run_collisions(0, {"python": ReferenceIndex, "planted": PLANTED_CONTRADICTIONS[1]})
    assert any("seed 0 of collisions" in note for note in failed.value.__notes__)
