"""The simulation itself is tested: each of these bugs must make it fail, and soon."""

from collections.abc import Callable

import pytest

from tests.simulation import planted_followers, planted_indexes, planted_keepers, planted_sources, planted_writers
from tests.simulation.planted import Planted
from tests.simulation.world import World

PLANTED: tuple[Planted, ...] = (
    *planted_followers.PLANTED,
    *planted_indexes.PLANTED,
    *planted_writers.PLANTED,
    *planted_sources.PLANTED,
    *planted_keepers.PLANTED,
)


def is_found(world: World) -> bool:
    try:
        world.run()
    except Exception:  # noqa: BLE001 - a bug may show as any error
        return True
    return False


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
@pytest.mark.planted
def test_the_simulation_fails_on_a_planted_bug(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(planted.place, planted.bug)
    if planted.beside is not None:
        monkeypatch.setattr(*planted.beside)
    seeds = sorted(range(planted.within), key=planted.found_by.__ne__)
    found = next((seed for seed in seeds if is_found(World(planted.kind, seed))), None)
    assert found is not None, f"no seed of {planted.kind} below {planted.within} finds it"
    record_property("found_by", found)
