"""Every row of the table of sessions."""

from typing import Any

import pytest

from kv_protocol.ledger import Cancelled, Expired, Finished, Routed
from router.decision.affinity import Affinity, AffinityLimits
from tests.unit.router.samples import rank

IDLE_S = 600.0


def routed(lease_id: str, session_id: str, at: str = "w0/0") -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=rank(at).worker_id,
        dp_rank=rank(at).dp_rank,
        blocks=b"",
        uncached_tokens=0,
        session_id=session_id,
    )


def test_a_session_is_bound_to_the_rank_that_it_was_routed_to_last() -> None:
    affinity = Affinity()
    affinity.apply(routed("l1", "s", "w0/0"), 0.0)
    assert affinity.bound("s", 0.0) == rank("w0/0")
    affinity.apply(routed("l2", "s", "w1/2"), 1.0)
    assert affinity.bound("s", 1.0) == rank("w1/2")
    assert affinity.statistics().moved_total == 1


@pytest.mark.parametrize("ending", [Finished, Cancelled, Expired])
def test_the_idle_time_begins_when_its_last_lease_ends(ending: Any) -> None:
    affinity = Affinity(AffinityLimits(idle_s=IDLE_S))
    affinity.apply(routed("l1", "s"), 0.0)
    affinity.apply(routed("l2", "s"), 0.0)
    affinity.apply(ending(lease_id="l1"), 10.0)
    assert affinity.bound("s", 10.0 + IDLE_S) == rank("w0/0")
    affinity.apply(ending(lease_id="l2"), 1000.0)
    assert affinity.bound("s", 1000.0 + IDLE_S - 0.1) == rank("w0/0")
    assert affinity.bound("s", 1000.0 + IDLE_S) is None
    affinity.tick(1000.0 + IDLE_S)
    assert affinity.statistics().sessions == 0


def test_a_worker_that_left_binds_no_session_and_its_leases_end_without_effect() -> None:
    affinity = Affinity()
    affinity.apply(routed("l1", "s", "w0/0"), 0.0)
    affinity.apply(routed("l2", "t", "w1/0"), 0.0)
    affinity.forget("w0")
    assert (affinity.bound("s", 0.0), affinity.bound("t", 0.0)) == (None, rank("w1/0"))
    affinity.apply(routed("l3", "s", "w1/0"), 1.0)
    affinity.apply(Finished(lease_id="l1"), 2.0)
    assert affinity.statistics().in_flight == 2


def test_a_session_that_was_idle_and_goes_elsewhere_has_moved() -> None:
    affinity = Affinity()
    for lease_id, name in (("l1", "w0/0"), ("l2", "w0/0"), ("l3", "w1/0")):
        affinity.apply(routed(lease_id, "s", name), 0.0)
        affinity.apply(Finished(lease_id=lease_id), 1.0)
    assert affinity.statistics().moved_total == 1


def test_of_several_idle_sessions_the_one_that_became_so_first_goes() -> None:
    affinity = Affinity(AffinityLimits(sessions_max=2))
    for name in "abc":
        affinity.apply(routed(f"l-{name}", name), 0.0)
        affinity.apply(Finished(lease_id=f"l-{name}"), 1.0)
    assert [affinity.bound(name, 1.0) is not None for name in "abc"] == [False, True, True]


def test_beyond_the_bound_the_longest_idle_goes_and_of_those_in_flight_the_oldest() -> None:
    affinity = Affinity(AffinityLimits(sessions_max=2))
    for name in "ab":
        affinity.apply(routed(f"l-{name}", name), 0.0)
    affinity.apply(Finished(lease_id="l-b"), 1.0)
    affinity.apply(routed("l-c", "c"), 2.0)
    assert [affinity.bound(name, 2.0) is not None for name in "abc"] == [True, False, True]
    affinity.apply(routed("l-d", "d"), 3.0)
    assert [affinity.bound(name, 3.0) is not None for name in "abcd"] == [False, False, True, True]
    assert affinity.statistics().evicted_total == 2
