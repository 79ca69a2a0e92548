"""Every row of the ledger's table (`tests/reference/ledger.py`), and what changes nothing."""

import pytest

from kv_protocol.fleet import WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, JournalRecord, LedgerApplied
from kv_protocol.ledger import Expired, Finished, LedgerEvent, Reconciled, Renewed, Routed
from router.decision.state import RankLoad, RouterState
from tests.reference.ledger import SILENT_S
from tests.unit.router.samples import ask, chain, joined, rank, registered, route, tell

A0, A1, B0 = rank("a/0"), rank("a/1"), rank("b/0")


def routed(lease_id: str, *blocks: int, at: WorkerRank = A0, uncached: int = 7) -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        blocks=chain(*blocks),
        uncached_tokens=uncached,
    )


def ledger(*events: LedgerEvent, lease_s: float = 10.0) -> RouterState:
    folded = joined(registered("a", dp_ranks=(0, 1)), registered("b"), lease_s=lease_s)
    tell(folded, *events)
    return folded


def reported(at: WorkerRank, running: int, waiting: int, used: int) -> Reconciled:
    return Reconciled(
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        running_requests=running,
        waiting_requests=waiting,
        used_blocks=used,
    )


def expired(*lease_ids: str, now_s: float, cause: str = "silence") -> list[JournalRecord]:
    return [LedgerApplied(now_s=now_s, event=Expired(lease_id=each, cause=cause)) for each in lease_ids]  # type: ignore[arg-type]


def test_columns_do_not_change_once_they_were_told_and_cannot_be_changed() -> None:
    folded = ledger(routed("l", 1))
    before, columns = folded.decide(route(), ask, 0.0, 1).view, list[list[int]]()
    tell(folded, routed("m", 2, at=B0), Finished(lease_id="l"))
    for seen in (before, folded.decide(route(), ask, 0.0, 1).view):
        columns += seen.queued_tokens.tolist(), seen.active_requests.tolist(), seen.active_blocks.tolist()
    assert columns == [[7, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 7], [0, 0, 1], [0, 0, 1]]
    with pytest.raises(ValueError, match="read-only"):
        before.active_blocks[0] = 5


def test_there_may_be_any_number_of_ranks() -> None:
    folded = joined(registered("w", dp_ranks=tuple(range(300))))
    tell(folded, *(routed(f"l{number}", at=WorkerRank("w", number), uncached=number) for number in range(300)))
    assert folded.decide(route(), ask, 0.0, 1).view.queued_tokens.tolist() == list(range(300))


# ---------------------------------------------------------------- leases


def test_overdue_leases_are_told_eldest_first_and_the_others_not() -> None:
    folded = ledger(routed("l"), routed("m"))
    tell(folded, routed("n"), now_s=1.0)
    tell(folded, Renewed(lease_id="l"), now_s=2.0)
    assert folded.tick(11.0) == expired("m", "n", now_s=11.0)
    assert folded.tick(12.0) == expired("m", "n", "l", now_s=12.0)


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
    folded.apply(FleetApplied(now_s=0.0, event=WorkerLeft(worker_id="a", instance="a-1")))
    assert folded.loads() == {
        A0: RankLoad(active_requests=1, active_blocks=1, prefill_tokens_queued=7),
        B0: RankLoad(reported_running=1, reported_waiting=2, reported_used_blocks=3),
    }
    tell(folded, Finished(lease_id="l"))
    assert set(folded.loads()) == {B0}


def test_an_idle_rank_of_a_worker_that_is_there_is_shown_with_zeroes() -> None:
    assert ledger(routed("l", 1), Finished(lease_id="l")).loads() == {A0: RankLoad()}


# ---------------------------------------------------------------- what engines report, and what it corrects


def reports(folded: RouterState, *told: int, begin_s: float, at: WorkerRank = A0) -> None:
    """The engine reports so many requests, one of them running, every 0.1 s."""
    for number, count in enumerate(told):
        tell(folded, reported(at, min(1, count), count - min(1, count), 0), now_s=begin_s + number * 0.1)


def test_unpromised_requests_in_several_reports_are_foreign_load() -> None:
    folded = ledger(routed("l", 1))
    reports(folded, 5, 4, 9, 4, begin_s=1.0)
    assert folded.load_of(A0).foreign_requests == 0, "one report too few"
    reports(folded, 6, begin_s=1.4)
    assert (folded.load_of(A0).foreign_requests, folded.load_of(A0).active_requests) == (3, 1)
    seen = folded.decide(route(), ask, 1.4, 1).view
    assert (seen.queued_tokens[0], seen.active_requests[0], seen.active_blocks[0]) == (7, 4, 1)


def test_leases_that_their_engine_knows_nothing_of_are_ended_the_eldest_first() -> None:
    folded = ledger(routed("other", 1, at=B0), lease_s=300.0)
    for number in range(4):
        tell(folded, routed(f"l{number}", number), now_s=float(number))
    reports(folded, 2, 1, 2, 1, 1, 2, begin_s=20.0)
    due = folded.tick(20.6)
    assert due == expired("l0", "l1", now_s=20.6, cause="engine")
    for each in due:
        folded.apply(each)
    assert folded.tick(20.7) == []
    left = folded.load_of(A0)
    assert (left.active_requests, left.active_blocks, left.prefill_tokens_queued) == (2, 2, 14)
    assert (folded.core.corrected_total, folded.core.expired_total) == (2, 0)


@pytest.mark.parametrize(("now_s", "is_ended"), [(19.75, False), (20.0, True)])
def test_a_lease_is_silent_once_silent_s_are_over(now_s: float, is_ended: bool) -> None:
    folded = ledger(lease_s=300.0)
    tell(folded, routed("l", 1), now_s=20.0 - SILENT_S)
    reports(folded, 0, 0, 0, 0, 0, 0, begin_s=19.0)
    assert folded.tick(now_s) == expired("l", now_s=now_s, cause="engine") * is_ended


def test_of_the_leases_that_are_too_many_every_router_ends_its_own() -> None:
    folded = ledger(lease_s=300.0)
    tell(folded, routed("l", 1), router="other")
    tell(folded, routed("m", 1), now_s=1.0)
    tell(folded, routed("n", 1), now_s=2.0)
    reports(folded, 1, 1, 1, 1, 1, 1, begin_s=20.0)
    assert folded.tick(20.6) == expired("m", now_s=20.6, cause="engine")


def test_the_figures_tell_how_far_promises_and_reports_differ() -> None:
    core = ledger(routed("l", 1), routed("m", 2), routed("n", 1, at=B0), reported(A0, 3, 4, 500)).core
    assert (core.open_leases, core.differences()) == (3, [(A0, 5)])
