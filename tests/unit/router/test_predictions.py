"""Every row of the table of predictions, and what changes nothing."""

from typing import Any

import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Reconciled, Renewed, Routed
from router.fleet.predictions import SEEN_S, Predictions
from tests.support.load_columns import expected_blocks

W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
EPOCH = 7


def routed(lease_id: str, *blocks: int, at: WorkerRank = W0, epoch: int = EPOCH) -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        blocks=pack_u64(blocks),
        uncached_tokens=1,
        epoch=epoch,
    )


def predictions(*events: LedgerEvent) -> Predictions:
    folded = Predictions()
    for event in events:
        folded.apply(event, 0.0)
    return folded


def overlap(folded: Predictions, *hashes: int, at: WorkerRank = W0, epoch: int = EPOCH, now_s: float = 0.0) -> int:
    return expected_blocks(folded, pack_u64(hashes), now_s, (at,), [epoch]).get(at, (epoch, 0))[1]


def expected(folded: Predictions, *hashes: int) -> dict[WorkerRank, tuple[int, int]]:
    return expected_blocks(folded, pack_u64(hashes), 0.0, (W0, W1), (EPOCH, 8))


def test_the_blocks_of_a_routed_request_are_on_their_way_to_its_rank_and_to_no_other() -> None:
    folded = predictions(routed("l", 1, 2, 3))
    assert (overlap(folded, 1, 2, 3), overlap(folded, 1, 2, 3, at=W1)) == (3, 0)


@pytest.mark.parametrize(("asked", "depth"), [((1, 2, 3, 4), 3), ((1, 2), 2), ((1, 9), 1), ((9,), 0), ((), 0)])
def test_leading_blocks_count(asked: tuple[int, ...], depth: int) -> None:
    assert overlap(predictions(routed("l", 1, 2, 3)), *asked) == depth


def test_of_several_requests_the_one_that_has_most_of_the_prefix_counts() -> None:
    folded = predictions(routed("l", 1, 2), routed("m", 1), routed("n", 1, 2, 3, 40), routed("o", 5), routed("p"))
    assert overlap(folded, 1, 2, 3, 4) == 3


def test_a_request_counts_until_two_seconds_after_its_first_token() -> None:
    folded = predictions(routed("l", 1))
    assert overlap(folded, 1, now_s=49.0) == 1
    folded.apply(FirstToken(lease_id="l"), 50.0)
    assert [overlap(folded, 1, now_s=now_s) for now_s in (51.9, 50.0 + SEEN_S)] == [1, 0]


def test_a_second_first_token_prolongs_nothing() -> None:
    folded = predictions(routed("l", 1), FirstToken(lease_id="l"))
    folded.apply(FirstToken(lease_id="l"), 1.0)
    assert overlap(folded, 1, now_s=SEEN_S) == 0


@pytest.mark.parametrize("ending", [Finished, Cancelled, Expired])
@pytest.mark.parametrize("seen", [False, True])
def test_a_request_that_ended_counts_no_more_and_its_siblings_do(ending: type[Any], seen: bool) -> None:
    folded = predictions(routed("l", 1, 2), routed("m", 1))
    if seen:
        folded.apply(FirstToken(lease_id="l"), 0.0)
    folded.apply(ending(lease_id="l"), 0.0)
    assert overlap(folded, 1, 2) == 1


def test_a_request_counts_in_the_epoch_in_which_it_was_routed() -> None:
    folded = predictions(routed("l", 1))
    assert expected(folded, 1, 2) == {W0: (EPOCH, 1)}


def test_with_a_request_in_another_epoch_what_was_on_its_way_before_counts_no_more() -> None:
    folded = predictions(routed("l", 1, 2, 3), routed("m", 1, epoch=8), routed("n", 1, 2, at=W1))
    assert expected(folded, 1, 2, 3) == {W0: (8, 1), W1: (EPOCH, 2)}
    folded.apply(routed("o", 9), 0.0)
    assert expected(folded, 1, 2, 3) == {W1: (EPOCH, 2)}


def test_a_rank_that_was_never_heard_has_an_epoch_too() -> None:
    assert overlap(predictions(routed("l", 1, epoch=0)), 1, epoch=0) == 1


def test_of_a_worker_that_is_forgotten_nothing_is_on_its_way() -> None:
    folded = predictions(routed("l", 1), routed("m", 1, at=WorkerRank("w0", 1)), routed("n", 1, at=W1))
    folded.forget("w0")
    assert [overlap(folded, 1, at=each) for each in (W0, WorkerRank("w0", 1), W1)] == [0, 0, 1]
    folded.apply(FirstToken(lease_id="l"), 0.0)
    folded.apply(Finished(lease_id="m"), 0.0)
    assert [overlap(folded, 1, at=each) for each in (W0, WorkerRank("w0", 1), W1)] == [0, 0, 1]


@pytest.mark.parametrize("event", [FirstToken, Renewed, Finished, Cancelled, Expired])
def test_of_an_unknown_lease_nothing_is_changed(event: type[Any]) -> None:
    assert overlap(predictions(routed("l", 1), event(lease_id="unknown")), 1, now_s=1e9) == 1


@pytest.mark.parametrize(
    "event",
    [
        Renewed(lease_id="l"),
        Reconciled(worker_id="w0", dp_rank=0, running_requests=0, waiting_requests=0, used_blocks=0),
        routed("l", 5, at=W1),
    ],
    ids=["renewed", "reconciled", "booked again"],
)
def test_what_says_nothing_of_a_requests_way_changes_nothing(event: LedgerEvent) -> None:
    folded = predictions(routed("l", 1), event)
    assert (overlap(folded, 1, now_s=1e9), overlap(folded, 5, at=W1)) == (1, 0)


def test_time_takes_what_is_over_and_changes_no_answer() -> None:
    folded = predictions(routed("l", 1), routed("m", 2), FirstToken(lease_id="l"))
    folded.tick(SEEN_S)
    assert (overlap(folded, 1, now_s=SEEN_S), overlap(folded, 2, now_s=SEEN_S)) == (0, 1)
    assert not folded.is_empty()
    folded.apply(Finished(lease_id="m"), SEEN_S)
    assert folded.is_empty()
