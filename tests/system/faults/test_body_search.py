"""The search for bad bodies, at real processes: it finds a planted quadratic parser, and nothing like it in ours.

Scores are CPU time of the process under test, so that what else the machine does is not seen. The figures that matter
are `router bench bodies`'s.
"""

import asyncio

import pytest

from bench.bodies.command import fleet_shape, searched, targets_of
from bench.bodies.probe import probe
from bench.bodies.shapes import FILLERS, Search
from bench.processes import FleetProcesses

SEED = 7
SIZES = (4 << 10, 60 << 10, 250 << 10)
SMALLER_SIZES = (4 << 10, 60 << 10, 120 << 10)
"""For the quadratic parser, which would take minutes over the others."""
DRAWS = 40
AGAIN, REPEATS = 3, 2
"""How many of the worst are sent again, and how often: a busy machine makes some look worse than they are."""
OBJECTS = {name for name, filler in FILLERS.items() if filler(2000).count(b"{") > 20}


async def search(module: str, at: int, sizes: tuple[int, ...] = SIZES) -> Search:
    """Return what a search finds at a process of a fleet whose router is `module`: 0 the router, 1 the agent."""
    async with FleetProcesses(fleet_shape("byte", "auto", router_module=module)) as fleet:
        target = targets_of(fleet)[at]
        found = await asyncio.to_thread(searched, target, SEED, DRAWS, sizes, by_cpu=True)
        for shape in found.worst(AGAIN):
            again = [await asyncio.to_thread(probe, target, shape.path, shape.body()) for _ in range(REPEATS)]
            found.scores[shape] = min(found.scores[shape], *(each.cpu_s for each in again))
        return found


@pytest.mark.timeout(300)  # two fleets, each with a search
async def test_a_quadratic_parser_is_found_and_ours_is_none() -> None:
    planted = await search("tests.support.slow_router", 0, SMALLER_SIZES)
    ours = await search("router", 0, SMALLER_SIZES)
    (worst,) = planted.worst(1)
    assert worst.filler in OBJECTS, worst
    assert planted.scores[worst] > 4 * max(ours.scores.values()), (worst, ours.worst(1))


async def test_no_body_of_an_agent_costs_more_than_its_size_explains() -> None:
    found = await search("router", 1)
    small = max((score for shape, score in found.scores.items() if shape.size_bytes == SIZES[0]), default=0.0)
    (worst,) = found.worst(1)
    assert found.scores[worst] < 1.0 + 2 * small * max(SIZES) / SIZES[0], worst
