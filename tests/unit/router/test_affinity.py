"""Every row of the table of sessions (`tests/reference/affinity.py`)."""

from typing import Any

import pytest

from kv_protocol.fleet import WorkerLeft
from kv_protocol.journal import FleetApplied
from kv_protocol.ledger import Cancelled, Expired, Finished, Routed
from router.decision.state import RouterState
from router.decision.state_settings import AffinityLimits
from tests.unit.router.samples import joined, rank, registered, tell

IDLE_S = 600.0


def workers(sessions_max: int = 100) -> RouterState:
    limits = AffinityLimits(idle_s=IDLE_S, sessions_max=sessions_max)
    return joined(registered("w0"), registered("w1", dp_ranks=(0, 2)), affinity=limits)


def routed(lease_id: str, session_id: str, at: str = "w0/0") -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=rank(at).worker_id,
        dp_rank=rank(at).dp_rank,
        blocks=b"",
        uncached_tokens=0,
        session_id=session_id,
    )


def figures(folded: RouterState) -> dict[str, int]:
    return dict(zip(("sessions", "in_flight", "evicted", "moved"), folded.core.session_figures(), strict=True))


def bound(folded: RouterState, names: str, now_s: float) -> list[bool]:
    return [folded.core.bound(name, now_s) is not None for name in names]


def test_a_session_is_bound_to_the_rank_that_it_was_routed_to_last() -> None:
    folded = workers()
    tell(folded, routed("l1", "s", "w0/0"))
    assert folded.core.bound("s", 0.0) == rank("w0/0")
    tell(folded, routed("l2", "s", "w1/2"), now_s=1.0)
    assert folded.core.bound("s", 1.0) == rank("w1/2")
    assert figures(folded)["moved"] == 1


@pytest.mark.parametrize("ending", [Finished, Cancelled, Expired])
def test_the_idle_time_begins_when_its_last_lease_ends(ending: Any) -> None:
    folded = workers()
    tell(folded, routed("l1", "s"), routed("l2", "s"))
    tell(folded, ending(lease_id="l1"), now_s=10.0)
    assert folded.core.bound("s", 10.0 + IDLE_S) == rank("w0/0")
    tell(folded, ending(lease_id="l2"), now_s=1000.0)
    assert folded.core.bound("s", 1000.0 + IDLE_S - 0.1) == rank("w0/0")
    assert folded.core.bound("s", 1000.0 + IDLE_S) is None
    folded.tick(1000.0 + IDLE_S)
    assert figures(folded)["sessions"] == 0


def test_a_worker_that_left_binds_no_session_and_its_leases_end_without_effect() -> None:
    folded = workers()
    tell(folded, routed("l1", "s", "w0/0"), routed("l2", "t", "w1/0"))
    folded.apply(FleetApplied(now_s=0.0, event=WorkerLeft(worker_id="w0", instance="w0-1")))
    assert (folded.core.bound("s", 0.0), folded.core.bound("t", 0.0)) == (None, rank("w1/0"))
    tell(folded, routed("l3", "s", "w1/0"), now_s=1.0)
    tell(folded, Finished(lease_id="l1"), now_s=2.0)
    assert figures(folded)["in_flight"] == 2


def test_a_session_that_was_idle_and_goes_elsewhere_has_moved() -> None:
    folded = workers()
    for lease_id, name in (("l1", "w0/0"), ("l2", "w0/0"), ("l3", "w1/0")):
        tell(folded, routed(lease_id, "s", name))
        tell(folded, Finished(lease_id=lease_id), now_s=1.0)
    assert figures(folded)["moved"] == 1


def test_of_several_idle_sessions_the_one_that_became_so_first_goes() -> None:
    folded = workers(sessions_max=2)
    for name in "abc":
        tell(folded, routed(f"l-{name}", name))
        tell(folded, Finished(lease_id=f"l-{name}"), now_s=1.0)
    assert bound(folded, "abc", 1.0) == [False, True, True]


def test_beyond_the_bound_the_longest_idle_goes_and_of_those_in_flight_the_oldest() -> None:
    folded = workers(sessions_max=2)
    tell(folded, routed("l-a", "a"), routed("l-b", "b"))
    tell(folded, Finished(lease_id="l-b"), now_s=1.0)
    tell(folded, routed("l-c", "c"), now_s=2.0)
    assert bound(folded, "abc", 2.0) == [True, False, True]
    tell(folded, routed("l-d", "d"), now_s=3.0)
    assert bound(folded, "abcd", 3.0) == [False, False, True, True]
    assert figures(folded)["evicted"] == 2
