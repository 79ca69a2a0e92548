"""Recorded requests played through simulated engines under a policy, in virtual time.

They arrive when they were decided, whatever the fleet does: clients that waited for an answer before they asked on do
not wait longer here. Caches are empty at first, so the first `WARM` of the requests are played and not counted. Ranks
neither join nor leave.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.routing.trace import TraceRequest, at_rate
from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from bench.routing.virtual_router import Told, VirtualClock
from bench.side_by_side import play_side_by_side
from bench.what_if.fit import REQUESTS, Fit, fitted
from bench.what_if.recorded import JournalUnfit, RankSpeed, Recorded, SpeedLearner, speeds_of
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.verdict import Verdict
from worker_agent.engines.simulated.timing import EngineTiming

WARM = 0.1
SEED = 1
_RESERVE_BLOCKS = 8

Floats = NDArray[np.float64]


class Played(NamedTuple):
    """One run: of each counted request, in the order of arrival, what came of it."""

    arrival_s: Floats
    end_s: Floats
    worker: NDArray[np.int64]
    isl_tokens: Floats
    cached_tokens: Floats
    ttft_s: Floats
    itl_s: Floats


class Stage(NamedTuple):
    """What all policies are played on: the requests and the fleet."""

    requests: list[TraceRequest]
    shape: VirtualFleetShape
    fit: Fit


def staged(recorded: Recorded, prior: EngineTiming, kv_blocks: int = 0) -> Stage:
    """Return the stage of a journal: its requests, and engines that are fitted to its fleet.

    Raises:
        JournalUnfit: there are no requests, or a request does not fit into a rank's cache.
    """
    requests = recorded.trace()
    fleet = recorded.fleet
    assert fleet is not None, "a journal with requests has a fleet"
    seq_len = max(each.isl_tokens + each.osl_tokens for each in requests)
    descriptions = fleet.descriptions(kv_blocks, seq_len)
    smallest = min(each.total_kv_blocks for each in descriptions)
    if seq_len // fleet.block_size + _RESERVE_BLOCKS > smallest:
        raise JournalUnfit(f"a request of {seq_len} tokens does not fit into a rank of {smallest} KV blocks")
    shape = VirtualFleetShape(
        workers=len(fleet.ranks),
        kv_tokens=smallest * fleet.block_size,
        block_size=fleet.block_size,
        descriptions=descriptions,
        id_tokens=fleet.block_size,
    )
    play = partial(_learnt, requests[:REQUESTS], shape, fleet.policy)
    fit = fitted(prior, speeds_of(recorded.speeds, fleet.ranks), play)
    return Stage(requests, shape._replace(timings=fit.timings), fit)


class _Learning:
    """Learns the speed of a simulated fleet's ranks as a journal's reader does."""

    def __init__(self) -> None:
        self.speeds = SpeedLearner()

    def record(self, what: Told) -> None:
        if isinstance(what, Verdict):
            self.speeds.decided(what)
        elif isinstance(what, OutcomeKnown):
            self.speeds.ended(what)


def _learnt(
    requests: Sequence[TraceRequest], shape: VirtualFleetShape, policy: Policy, timings: Sequence[EngineTiming]
) -> list[RankSpeed]:
    learning = _Learning()

    def recorder_of(_state: RouterState, _clock: VirtualClock) -> _Learning:
        return learning

    timed = shape._replace(timings=tuple(timings))
    VirtualFleet(timed, policy, requests, seed=SEED, recorder_of=recorder_of).run()
    return speeds_of(learning.speeds, [WorkerRank(f"w{number}", 0) for number in range(shape.workers)])


class Cell(NamedTuple):
    """A policy at a load: arrivals come so many times as fast as recorded."""

    name: str
    policy: Policy
    load: float = 1.0


def play(stage: Stage, cell: Cell) -> Played:
    """Play the requests under the policy."""
    requests = at_rate(stage.requests, cell.load)
    outcomes = VirtualFleet(stage.shape, cell.policy, requests, seed=SEED).run()
    ordered = sorted(outcomes, key=lambda each: each.number)[int(WARM * len(outcomes)) :]
    return Played(
        arrival_s=np.array([each.arrival_s for each in ordered]),
        end_s=np.array([each.arrival_s + each.e2e_s for each in ordered]),
        worker=np.array([each.worker for each in ordered]),
        isl_tokens=np.array([float(each.isl_tokens) for each in ordered]),
        cached_tokens=np.array([float(each.cached_tokens) for each in ordered]),
        ttft_s=np.array([each.ttft_s for each in ordered]),
        itl_s=np.array([each.itl_s for each in ordered]),
    )


def play_all(stage: Stage, cells: Sequence[Cell], jobs: int) -> dict[Cell, Played]:
    """Play all cells, `jobs` at a time; their order stays."""
    found = dict(play_side_by_side(partial(play, stage), cells, jobs))
    return {cell: found[cell] for cell in cells}
