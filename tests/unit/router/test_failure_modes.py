"""Failures of other routers that this one must not have; numbers as in `event_plane.md`, section 7."""

from collections.abc import Sequence

import pytest

from kv_protocol.fleet import WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import BreakerChanged, FleetApplied, JournalRecord, WorkerHeard
from router.core.decide import Policy, decide
from router.core.errors import NoEligibleWorker
from router.core.state import Overlap
from tests.unit.router.samples import registered, route, state

DEAD = {
    "it fell silent": (),
    "it left": (FleetApplied(now_s=8.0, event=WorkerLeft(worker_id="w0", instance="w0-1")),),
    "it refused a connection": (
        WorkerHeard(now_s=9.0, worker_id="w0", instance="w0-1"),
        BreakerChanged(now_s=9.0, worker_id="w0", reason="connection refused", open_until_s=60.0),
    ),
}


def held_by_the_dead(hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> list[Overlap]:
    """Of w0 the index holds the whole prefix, of anybody else nothing."""
    depths = {rank: len(hashes) if rank.worker_id == "w0" else 0 for rank in ranks}
    return [((depth, depth, depth, depth), 7, 9, "") for depth in depths.values()]


@pytest.mark.parametrize("death", DEAD.values(), ids=DEAD)
def test_09_a_dead_worker_is_not_chosen_whatever_it_holds_or_whoever_wishes(
    death: tuple[JournalRecord, ...],
) -> None:
    folded = state()
    for worker_id in ("w0", "w1"):
        folded.apply(FleetApplied(now_s=0.0, event=registered(worker_id)))
        folded.apply(WorkerHeard(now_s=0.0, worker_id=worker_id, instance=f"{worker_id}-1"))
    request = route(640)
    assert (
        decide(
            folded.view(request, held_by_the_dead, 1.0, predict_on_route=True), request, Policy(), 0
        ).chosen.worker_id
        == "w0"
    )
    for record in (*death, WorkerHeard(now_s=9.0, worker_id="w1", instance="w1-1")):
        folded.apply(record)
    assert (
        decide(
            folded.view(request, held_by_the_dead, 10.0, predict_on_route=True), request, Policy(), 0
        ).chosen.worker_id
        == "w1"
    )
    wished = route(640, pinned_worker="w0")
    with pytest.raises(NoEligibleWorker):
        decide(folded.view(wished, held_by_the_dead, 10.0, predict_on_route=True), wished, Policy(), 0)
