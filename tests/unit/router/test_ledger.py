"""Every row of the ledger's table, and what changes nothing."""

from typing import Any

import msgspec
import pytest

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Reconciled, Renewed, Routed
from router.core.ledger import Ledger, RankLoad

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
LEASE_S = 10.0


def routed(lease_id: str, *blocks: int, at: WorkerRank = A0, uncached: int = 7, extra: int = 0) -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        blocks=blocks,
        uncached_tokens=uncached,
        extra_blocks=extra,
    )


def ledger(*events: LedgerEvent, now_s: float = 0.0) -> Ledger:
    folded = Ledger(LEASE_S)
    for event in events:
        folded.apply(event, now_s)
    return folded


def reported(at: WorkerRank, running: int, waiting: int, used: int) -> Reconciled:
    return Reconciled(
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        running_requests=running,
        waiting_requests=waiting,
        used_blocks=used,
    )


def promised(folded: Ledger, at: WorkerRank = A0) -> tuple[int, int, int]:
    load = folded.load_of(at)
    return load.active_requests, load.active_blocks, load.prefill_tokens_queued


def test_an_unknown_rank_has_no_load() -> None:
    assert ledger().load_of(A0) == RankLoad()
    assert ledger().loads() == {}


def test_routed_promises_blocks_and_uncached_tokens_to_one_rank() -> None:
    folded = ledger(routed("l", 1, 2, 3, uncached=40, extra=1))
    assert promised(folded) == (1, 4, 40)
    assert promised(folded, A1) == promised(folded, B0) == (0, 0, 0)


def test_blocks_are_counted_once_a_rank_and_partial_ones_once_a_request() -> None:
    folded = ledger(routed("l", 1, 2, extra=1), routed("m", 1, 2, 3, extra=1), routed("n", 1, at=A1))
    assert promised(folded) == (2, 5, 14)
    assert promised(folded, A1) == (1, 1, 7)


def test_a_shared_block_stays_until_the_last_request_that_has_it_ends() -> None:
    folded = ledger(routed("l", 1, 2), routed("m", 1, 3), Finished(lease_id="l"))
    assert promised(folded)[1] == 2
    assert folded.shared_blocks((1, 2, 3)) == {A0: 2}


def test_the_first_token_ends_the_prefill_and_nothing_else() -> None:
    folded = ledger(routed("l", 1, 2, uncached=40, extra=1), routed("m", uncached=5), FirstToken(lease_id="l"))
    assert promised(folded) == (2, 3, 5)


def test_a_second_first_token_takes_nothing_twice() -> None:
    folded = ledger(routed("l", 1, uncached=40), FirstToken(lease_id="l"), FirstToken(lease_id="l"))
    assert promised(folded) == (1, 1, 0)


@pytest.mark.parametrize("ending", [Finished, Cancelled, Expired])
@pytest.mark.parametrize("prefilled", [False, True])
def test_after_any_ending_nothing_is_promised(ending: type[Any], prefilled: bool) -> None:
    folded = ledger(routed("l", 1, 2, uncached=40, extra=1))
    if prefilled:
        folded.apply(FirstToken(lease_id="l"), 0.0)
    folded.apply(ending(lease_id="l"), 0.0)
    assert promised(folded) == (0, 0, 0)
    assert folded.shared_blocks((1, 2)) == {}
    assert folded.tick(1e9) == []


@pytest.mark.parametrize("event", [FirstToken, Renewed, Finished, Cancelled, Expired])
def test_of_an_unknown_lease_nothing_is_changed(event: type[Any]) -> None:
    folded = ledger(routed("l", 1))
    before = folded.loads()
    folded.apply(event(lease_id="nobody"), 0.0)
    assert folded.loads() == before


@pytest.mark.parametrize("ending", [Finished, Cancelled, Expired])
def test_a_second_ending_changes_nothing(ending: type[Any]) -> None:
    folded = ledger(routed("l", 1), routed("m", 1), Finished(lease_id="l"), ending(lease_id="l"))
    assert promised(folded) == (1, 1, 7)


def test_a_lease_is_booked_once() -> None:
    folded = ledger(routed("l", 1, uncached=40), routed("l", 1, 2, uncached=99), routed("l", 5, at=B0))
    assert promised(folded) == (1, 1, 40)
    assert promised(folded, B0) == (0, 0, 0)


def test_shared_blocks_are_told_for_every_rank_that_works_on_any() -> None:
    folded = ledger(routed("l", 1, 2, 3), routed("m", 3, 4, at=A1), routed("n", 9, at=B0))
    assert folded.shared_blocks((1, 3, 4, 5)) == {A0: 2, A1: 2}
    assert folded.shared_blocks(()) == {}


# ---------------------------------------------------------------- leases


def test_a_lease_is_over_after_its_time_and_not_before() -> None:
    folded = ledger(routed("l", 1))
    assert folded.tick(LEASE_S - 0.001) == []
    assert folded.tick(LEASE_S) == [Expired(lease_id="l")]


def test_until_the_ending_is_applied_the_promise_stands_and_is_told_again() -> None:
    folded = ledger(routed("l", 1))
    assert folded.tick(LEASE_S) == folded.tick(LEASE_S) == [Expired(lease_id="l")]
    assert promised(folded) == (1, 1, 7)


def test_an_expired_lease_is_counted_once_when_it_ends() -> None:
    folded = ledger(routed("l", 1))
    folded.tick(LEASE_S)
    folded.tick(LEASE_S)
    assert folded.expired_total == 0
    for _ in range(2):
        folded.apply(Expired(lease_id="l"), LEASE_S)
    assert folded.expired_total == 1


def test_only_expiries_are_counted_as_such() -> None:
    folded = ledger(routed("l"), Finished(lease_id="l"), routed("m"), Cancelled(lease_id="m"), Expired(lease_id="m"))
    assert folded.expired_total == 0


@pytest.mark.parametrize("event", [FirstToken, Renewed])
def test_signs_of_life_make_the_lease_run_anew(event: type[Any]) -> None:
    folded = ledger(routed("l", 1))
    folded.apply(event(lease_id="l"), 6.0)
    assert folded.tick(15.999) == []
    assert folded.tick(16.0) == [Expired(lease_id="l")]


def test_overdue_leases_are_told_eldest_first_and_the_others_not() -> None:
    folded = ledger(routed("l"), routed("m"), now_s=0.0)
    folded.apply(routed("n"), 1.0)
    folded.apply(Renewed(lease_id="l"), 2.0)
    assert [expired.lease_id for expired in folded.tick(11.0)] == ["m", "n"]
    assert [expired.lease_id for expired in folded.tick(12.0)] == ["m", "n", "l"]


# ---------------------------------------------------------------- reports and leaving


def test_a_report_stands_beside_the_promise() -> None:
    folded = ledger(routed("l", 1, 2, uncached=40), reported(A0, 3, 4, 500))
    assert folded.load_of(A0) == RankLoad(
        active_requests=1,
        active_blocks=2,
        prefill_tokens_queued=40,
        reported_running=3,
        reported_waiting=4,
        reported_used_blocks=500,
    )


def test_of_a_worker_that_left_nothing_is_shown_once_its_requests_are_over() -> None:
    folded = ledger(routed("l", 1), reported(A0, 3, 4, 500), reported(A1, 1, 1, 1), reported(B0, 1, 2, 3))
    folded.forget("a")
    assert folded.loads() == {
        A0: RankLoad(active_requests=1, active_blocks=1, prefill_tokens_queued=7),
        B0: RankLoad(reported_running=1, reported_waiting=2, reported_used_blocks=3),
    }
    folded.apply(Finished(lease_id="l"), 0.0)
    assert set(folded.loads()) == {B0}


def test_an_idle_rank_of_a_worker_that_is_there_is_shown_with_zeroes() -> None:
    assert ledger(routed("l", 1), Finished(lease_id="l")).loads() == {A0: RankLoad()}


def test_a_worker_that_came_back_while_old_requests_ran_is_shown() -> None:
    folded = ledger(routed("l", 1))
    folded.forget("a")
    folded.apply(reported(A0, 1, 0, 5), 0.0)
    folded.apply(Finished(lease_id="l"), 0.0)
    assert folded.loads() == {A0: RankLoad(reported_running=1, reported_used_blocks=5)}


def test_a_load_that_was_asked_for_is_a_copy() -> None:
    folded = ledger(routed("l", 1))
    copies = [folded.load_of(A0), folded.loads()[A0]]
    for copy in copies:
        copy.active_requests = 99
    assert promised(folded) == (1, 1, 7)
    assert msgspec.structs.asdict(folded.load_of(A0))["active_requests"] == 1
