"""Every row of the ledger's table, and what changes nothing."""

import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import (
    Expired,
    Finished,
    LedgerEvent,
    Reconciled,
    Renewed,
    Routed,
)
from router.fleet.ledger import SILENT_S, Ledger, RankLoad

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
LEASE_S = 10.0


def routed(lease_id: str, *blocks: int, at: WorkerRank = A0, uncached: int = 7, extra: int = 0) -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        blocks=pack_u64(blocks),
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


def promised(folded: Ledger) -> tuple[int, int, int]:
    load = folded.load_of(A0)
    return load.active_requests, load.active_blocks, load.prefill_tokens_queued


def columns(folded: Ledger, *ranks: WorkerRank) -> tuple[list[int], ...]:
    return tuple(column.tolist() for column in folded.columns(ranks)[:3])


def test_columns_do_not_change_once_they_were_told_and_cannot_be_changed() -> None:
    folded, ranks = ledger(routed("l", 1)), (A0, B0)
    before = folded.columns(ranks)
    folded.apply(routed("m", 2, at=B0), 0.0)
    folded.apply(Finished(lease_id="l"), 0.0)
    assert [column.tolist() for column in before] == [[7, 0], [1, 0], [1, 0], [0, 0]]
    assert [column.tolist() for column in folded.columns(ranks)] == [[0, 7], [0, 1], [0, 1], [0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        before.active_blocks[0] = 5


def test_there_may_be_any_number_of_ranks() -> None:
    ranks = tuple(WorkerRank(f"w{number}", 0) for number in range(300))
    folded = ledger(*(routed(f"l{number}", 1, at=at, uncached=number) for number, at in enumerate(ranks)))
    assert folded.columns(ranks).queued_tokens.tolist() == list(range(300))


# ---------------------------------------------------------------- leases


def test_overdue_leases_are_told_eldest_first_and_the_others_not() -> None:
    folded = ledger(routed("l"), routed("m"), now_s=0.0)
    folded.apply(routed("n"), 1.0)
    folded.apply(Renewed(lease_id="l"), 2.0)
    assert folded.tick(11.0) == [Expired(lease_id=lease_id) for lease_id in ("m", "n")]
    assert folded.tick(12.0) == [Expired(lease_id=lease_id) for lease_id in ("m", "n", "l")]


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


# ---------------------------------------------------------------- what engines report, and what it corrects


def reports(folded: Ledger, *told: int, begin_s: float, at: WorkerRank = A0) -> None:
    """The engine reports so many requests, one of them running, every 0.1 s."""
    for number, count in enumerate(told):
        folded.apply(reported(at, min(1, count), count - min(1, count), 0), begin_s + number * 0.1)


def test_unpromised_requests_in_several_reports_are_foreign_load() -> None:
    folded = ledger(routed("l", 1))
    reports(folded, 5, 4, 9, 4, begin_s=1.0)
    assert folded.load_of(A0).foreign_requests == 0, "one report too few"
    reports(folded, 6, begin_s=1.4)
    assert folded.load_of(A0).foreign_requests == 3
    assert columns(folded, A0) == ([7], [4], [1])
    assert folded.load_of(A0).active_requests == 1


def test_leases_that_their_engine_knows_nothing_of_are_ended_the_eldest_first() -> None:
    folded = Ledger(lease_s=300.0)
    for number in range(4):
        folded.apply(routed(f"l{number}", number), float(number))
    folded.apply(routed("other", 1, at=B0), 0.0)
    reports(folded, 2, 1, 2, 1, 1, 2, begin_s=20.0)
    expired = folded.tick(20.6)
    assert expired == [Expired(lease_id="l0", cause="engine"), Expired(lease_id="l1", cause="engine")]
    for each in expired:
        folded.apply(each, 20.6)
    assert folded.tick(20.7) == []
    assert promised(folded) == (2, 2, 14)
    assert (folded.statistics().corrected_total, folded.expired_total) == (2, 0)


@pytest.mark.parametrize(("now_s", "is_ended"), [(19.75, False), (20.0, True)])
def test_a_lease_is_silent_once_silent_s_are_over(now_s: float, is_ended: bool) -> None:
    folded = Ledger(lease_s=300.0)
    folded.apply(routed("l", 1), 20.0 - SILENT_S)
    reports(folded, 0, 0, 0, 0, 0, 0, begin_s=19.0)
    assert folded.tick(now_s) == [Expired(lease_id="l", cause="engine")] * is_ended


def test_of_the_leases_that_are_too_many_every_router_ends_its_own() -> None:
    folded = Ledger(lease_s=300.0)
    folded.apply(routed("l", 1), 0.0, "other")
    folded.apply(routed("m", 1), 1.0)
    folded.apply(routed("n", 1), 2.0)
    reports(folded, 1, 1, 1, 1, 1, 1, begin_s=20.0)
    assert folded.tick(20.6) == [Expired(lease_id="m", cause="engine")]


def test_the_statistics_tell_how_far_promises_and_reports_differ() -> None:
    folded = ledger(routed("l", 1), routed("m", 2), routed("n", 1, at=B0), reported(A0, 3, 4, 500))
    told = folded.statistics()
    assert (told.open_leases, told.differences) == (3, {A0: 5})


def test_a_ledger_that_is_restored_ends_the_same_leases() -> None:
    folded, restored = Ledger(lease_s=300.0), Ledger(lease_s=300.0)
    folded.apply(routed("l", 1), 0.0)
    reports(folded, 0, 0, 0, 0, 0, 0, begin_s=20.0)
    for rank_row in folded.rank_rows():
        restored.restore_rank(rank_row)
    for lease_row in folded.lease_rows():
        restored.restore_lease(lease_row)
    assert restored.tick(20.6) == folded.tick(20.6) == [Expired(lease_id="l", cause="engine")]
    restored.apply(routed("m", 1), 20.6)
    assert restored.tick(31.0)[:-1] == [Expired(lease_id="l", cause="engine")], "the younger one may not be known yet"
