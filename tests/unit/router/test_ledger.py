"""What the ledger shows of ranks (`tests/reference` has their tables)."""

from kv_protocol.fleet import WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LedgerApplied, LoadApplied
from kv_protocol.ledger import Finished, LedgerEvent, Routed
from router.decision.state import RankLoad, RouterState
from tests.unit.router.samples import ask, chain, joined, load, rank, registered, route, tell

A0, A1, B0 = rank("a/0"), rank("a/1"), rank("b/0")


def routed(lease_id: str, *blocks: int, at: WorkerRank = A0, uncached: int = 7) -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        blocks=chain(*blocks),
        uncached_tokens=uncached,
    )


def ledger(*events: LedgerEvent | LoadApplied, lease_s: float = 10.0) -> RouterState:
    folded = joined(registered("a", dp_ranks=(0, 1)), registered("b"), lease_s=lease_s)
    for event in events:
        folded.apply(event if isinstance(event, LoadApplied) else LedgerApplied(now_s=0.0, event=event))
    return folded


def test_columns_do_not_change_once_they_were_told() -> None:
    folded = ledger(routed("l", 1))
    before, columns = folded.decide(route(), ask, 0.0, 1).view(), list[list[int]]()
    tell(folded, routed("m", 2, at=B0), Finished(lease_id="l"))
    for seen in (before, folded.decide(route(), ask, 0.0, 1).view()):
        columns += seen.queued_tokens.tolist(), seen.active_requests.tolist(), seen.active_blocks.tolist()
    assert columns == [[7, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 7], [0, 0, 1], [0, 0, 1]]


def test_there_may_be_any_number_of_ranks() -> None:
    folded = joined(registered("w", dp_ranks=tuple(range(300))))
    tell(folded, *(routed(f"l{number}", at=WorkerRank("w", number), uncached=number) for number in range(300)))
    assert folded.decide(route(), ask, 0.0, 1).view().queued_tokens.tolist() == list(range(300))


# ---------------------------------------------------------------- reports and leaving


def test_a_report_stands_beside_the_promise() -> None:
    folded = ledger(routed("l", 1, 2, uncached=40), load(A0, 3, 4, 500))
    assert folded.load_of(A0) == RankLoad(
        active_requests=1,
        active_blocks=2,
        prefill_tokens_queued=40,
        reported_running=3,
        reported_waiting=4,
        reported_used_blocks=500,
    )


def test_of_a_worker_that_left_nothing_is_shown_once_its_requests_are_over() -> None:
    folded = ledger(routed("l", 1), load(A0, 3, 4, 500), load(A1, 1, 1, 1), load(B0, 1, 2, 3))
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
        folded.apply(load(at, min(1, count), count - min(1, count), 0, begin_s + number * 0.1))


def test_the_figures_tell_how_far_promises_and_reports_differ() -> None:
    core = ledger(routed("l", 1), routed("m", 2), routed("n", 1, at=B0), load(A0, 3, 4, 500)).core
    assert (core.open_leases, core.differences()) == (3, [(A0, 5)])
