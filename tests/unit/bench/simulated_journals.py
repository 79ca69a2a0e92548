"""Journals of small simulated fleets, as `router what-if` and `router tune` read and play them.

Engines need `SLOWER` times as long as the prior of the fit.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from bench.placement.regimes import REGIMES, Sizing
from bench.routing.virtual_engine import TEXT
from bench.routing.virtual_fleet import VirtualFleet
from bench.routing.virtual_router import Told, VirtualClock, tell
from bench.what_if.play import Cell, play_all, staged
from bench.what_if.recorded import JournalOfOne
from bench.what_if.report import IN_FORCE, Result, result_of
from kv_protocol.journal import JournalBegan, JournalRecord, decode_journal
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.journal.encoder import JournalEncoder
from worker_agent.engines.simulated.timing import H200_8B

LIVE = Policy(mode="kv")
SLOWER = 2.0
_REQUESTS_MAX = 5000


class SimulatedJournal:
    """The journal of a simulated fleet's router."""

    def __init__(self) -> None:
        self._encoder = JournalEncoder(1)
        self.records: list[JournalRecord] = []
        settings = msgspec.to_builtins(StateSettings(text=TEXT))
        self.record(JournalBegan(now_s=0.0, router="simulated", started_ns=1, settings=settings))

    def record(self, what: Told) -> None:
        """`what` was applied."""
        tell(self._encoder, what)
        self.records += decode_journal(self._encoder.cut().data).records


def journal_of(regime: str, policy: Policy = LIVE, *, scale: float, load: float, seed: int = 1) -> SimulatedJournal:
    """Return the journal of a fleet with small caches that serves the regime under the policy."""
    found, of = SimulatedJournal(), REGIMES[regime]
    workload = of.make(Sizing(seed, load, scale))

    def recorder_of(_state: RouterState, _clock: VirtualClock) -> SimulatedJournal:
        return found

    speeds = tuple(SLOWER * each for each in of.slowdowns or (1.0,))
    shape = of.fleet("small", workload)._replace(slowdowns=speeds)
    VirtualFleet(
        shape, policy, workload.requests, seed=seed, follow_ups=workload.follow_ups, recorder_of=recorder_of
    ).run()
    return found


def read(of: SimulatedJournal, others: Mapping[str, Mapping[str, Any]]) -> JournalOfOne:
    """Return the journal as it is read, with each other policy asked at its moments."""
    found = JournalOfOne(others, _REQUESTS_MAX, asks=True)
    for record in of.records:
        found.fold(record)
    return found


def played(of: JournalOfOne, jobs: int = 1) -> Result:
    """Return the policy in force and the others in the closed loop."""
    stage, fleet = staged(of.recorded, H200_8B), of.recorded.fleet
    assert fleet is not None, "a simulated router decides"
    cells = [Cell(name, policy) for name, policy in {IN_FORCE: fleet.policy, **of.policies}.items()]
    return result_of(of.recorded, stage, play_all(stage, cells, jobs))
