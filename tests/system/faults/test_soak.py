"""The soak itself: a short one finds nothing; cut answers and a router that ends are found."""

import sys
from pathlib import Path

from bench.soak.command import SoakPlan, SoakRun

PROGRAMS = Path(sys.executable).parent


async def test_a_short_soak_loses_nothing() -> None:
    soak = await SoakRun(SoakPlan(1_200, PROGRAMS, workers=4, fault_every=110, rounds=2), print).run()
    assert soak.tally.lost() == {}, soak.tally.examples
    assert soak.tally.requests == 1_200
    assert {each.fault.kind for each in soak.faults} >= {"worker killed", "nats-server killed"}
    assert [each.verified for each in soak.quiet] == [""] * 2
    assert soak.complaints == []
