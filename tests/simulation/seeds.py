"""Worlds by their number: seed n is a world of the kind that is n's turn, so that any row of seeds has all kinds."""

from tests.simulation.setup import Kind
from tests.simulation.world import World

ROUND: tuple[Kind, ...] = ("faulty", "torn", "restless", "faulty", "torn", "silent")
"""The kinds take turns in this order."""
TEST_SEEDS = 50
NIGHTLY_SEEDS = 120
"""How many `make test` and `make simulation` live through, from 0 on, and from there on."""


def kind_of(seed: int) -> Kind:
    """Return the kind of the world that a seed is."""
    return ROUND[seed % len(ROUND)]


def lived(kind: Kind, seed: int) -> World:
    """Return a world that has been run; its failure says which it was, and how to run it again."""
    world = World(kind, seed)
    try:
        world.run()
    except Exception as error:
        again = f".venv/bin/python -m tests.simulation.world {kind} {seed}"
        raise AssertionError(f"seed {seed} of kind {kind}: {error!r}\nrun it again: {again}") from error
    return world


def failure(seed: int) -> str:
    """Return what is wrong with a seed's world; empty where nothing is."""
    try:
        lived(kind_of(seed), seed)
    except AssertionError as error:
        return str(error)
    return ""
