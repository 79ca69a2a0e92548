"""Failures of other routers that this one must not have; numbers as in `docs/SOURCES.md` E7."""

import pytest

from indexer.embedded import OverlapColumns
from kv_protocol.fleet import WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptEnded, FleetApplied, JournalRecord, WorkerHeard
from router.decision.decide import decide
from router.decision.errors import NoEligibleWorker
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.view import RouteRequest
from router.prompt.chains import block_count
from tests.unit.router.samples import answer, registered, route, state

DEAD = {
    "it fell silent": (),
    "it left": (FleetApplied(now_s=8.0, event=WorkerLeft(worker_id="w0", instance="w0-1")),),
    "it refused a connection": (
        WorkerHeard(now_s=9.0, worker_id="w0", instance="w0-1"),
        AttemptEnded(now_s=9.0, worker_id="w0", dp_rank=0, outcome="failed", phase="connect"),
    ),
}


def held_by_the_dead(chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
    """The index knows w0 to hold the whole prefix, and the others to hold nothing."""
    depths = [block_count(chain) if rank.worker_id == "w0" else 0 for rank in ranks]
    return answer([((depth, depth, depth, depth), 7, 9, "") for depth in depths])


def chosen(folded: RouterState, request: RouteRequest, now_s: float) -> str:
    return decide(folded.view(request, held_by_the_dead, now_s), request, Policy(), 0).winner.worker_id


@pytest.mark.parametrize("death", DEAD.values(), ids=DEAD)
def test_09_a_dead_worker_is_not_chosen_whatever_it_holds_or_clients_pin(
    death: tuple[JournalRecord, ...],
) -> None:
    folded = state()
    for worker_id in ("w0", "w1"):
        folded.apply(FleetApplied(now_s=0.0, event=registered(worker_id)))
        folded.apply(WorkerHeard(now_s=0.0, worker_id=worker_id, instance=f"{worker_id}-1"))
    request = route(640)
    assert chosen(folded, request, 1.0) == "w0"
    for record in (*death, WorkerHeard(now_s=9.0, worker_id="w1", instance="w1-1")):
        folded.apply(record)
    assert chosen(folded, request, 10.0) == "w1"
    with pytest.raises(NoEligibleWorker):
        chosen(folded, route(640, pinned_worker="w0"), 10.0)
