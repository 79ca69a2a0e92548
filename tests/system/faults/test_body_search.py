"""The search for bad bodies, at real processes: it finds a planted quadratic parser, and nothing like it in ours.

Scores are CPU time of the process under test, so that what else the machine does is not seen.
"""

import asyncio

import pytest

from bench.processes import FleetProcesses, FleetShape
from tests.system.faults.bodies import FILLERS, Search, cost_s, searched

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
    shape = FleetShape(
        workers=1,
        worker_settings=("telemetry.log_level=error", "engine.speed=1000"),
        router_settings=("telemetry.log_level=error",),
        router_module=module,
    )
    async with FleetProcesses(shape) as fleet:
        (name, agent_url), *_ = fleet.worker_urls.items()
        url, pid = ((fleet.data_url, fleet.router.pid), (agent_url, fleet.workers[name].pid))[at]
        found = await asyncio.to_thread(searched, url, pid, SEED, DRAWS, sizes)
        for shape_found in found.worst(AGAIN):
            again = [await asyncio.to_thread(cost_s, url, pid, shape_found) for _ in range(REPEATS)]
            found.scores[shape_found] = min(found.scores[shape_found], *again)
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
