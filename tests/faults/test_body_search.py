"""The search for bad bodies, at real processes: it finds a planted quadratic parser, and nothing like it in ours.

Scores are CPU time of the process under test, so that what else the machine does is not seen. The figures that matter
are `router bench bodies`'s.
"""

import asyncio

import pytest

from bench.bodies import searched, targets_of
from bench.body_shapes import FILLERS, Search, Shape
from bench.processes import Fleet, FleetShape

pytestmark = pytest.mark.faults

SEED = 7
SIZES = (4 << 10, 60 << 10, 250 << 10)
DRAWS = 40
OBJECTS = {name for name, filler in FILLERS.items() if filler(2000).count(b"{") > 20}
_QUIET = ("telemetry.log_level=error",)


async def search(module: str, at: int) -> Search:
    """Return what a search finds at a process of a fleet whose router is `module`: 0 the router, 1 the agent."""
    shape = FleetShape(workers=1, worker_settings=_QUIET, router_settings=_QUIET, router_module=module)
    async with Fleet(shape) as fleet:
        return await asyncio.to_thread(searched, targets_of(fleet)[at], SEED, DRAWS, SIZES, by_cpu=True)


@pytest.mark.asyncio
async def test_a_quadratic_parser_is_found_and_ours_is_none() -> None:
    planted, ours = await search("tests.support.slow_router", 0), await search("router", 0)
    (worst,) = planted.worst(1)
    assert worst.filler in OBJECTS, worst
    assert planted.scores[worst] > 4 * max(ours.scores.values()), (worst, ours.worst(1))


@pytest.mark.asyncio
async def test_no_body_of_an_agent_costs_more_than_its_size_explains() -> None:
    found = await search("router", 1)
    small = max((score for shape, score in found.scores.items() if shape.size_bytes == SIZES[0]), default=0.0)
    (worst,) = found.worst(1)
    assert found.scores[worst] < 1.0 + 2 * small * max(SIZES) / SIZES[0], worst


def test_equal_seeds_draw_equal_shapes() -> None:
    def drawn() -> list[Shape]:
        made, shapes = Search(SEED, SIZES), []
        for shape in made.shapes(50):
            made.scores[shape] = len(shape.body())
            shapes.append(shape)
        return shapes

    assert drawn() == drawn()
    assert len(set(drawn())) == 50
