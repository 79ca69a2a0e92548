"""What was routed: how long it counts, how much of it, and what is forgotten with a worker."""

from collections.abc import Sequence

import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.ids import WorkerRank
from router.decision.approximate import ApproximateIndex, ApproximateLimits, ApproximateStatistics

TTL_S = 10.0
W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)


def index(blocks_max: int = 1000) -> ApproximateIndex:
    return ApproximateIndex(ApproximateLimits(ttl_s=TTL_S, blocks_max=blocks_max))


def overlap(folded: ApproximateIndex, *hashes: int, now_s: float = 0.0) -> int:
    return folded.overlap(pack_u64(hashes), (W0,), now_s)[0]


def kept(folded: ApproximateIndex) -> int:
    return folded.statistics().blocks.get(W0, 0)


def statistics(
    blocks: dict[WorkerRank, int], expired: int = 0, evicted: int = 0, left: int = 0
) -> ApproximateStatistics:
    return ApproximateStatistics(
        blocks=blocks, expired_blocks_total=expired, evicted_blocks_total=evicted, left_blocks_total=left
    )


def test_of_an_unknown_rank_nothing_is_known() -> None:
    assert index().overlap(pack_u64((1, 2)), (W0, W1), 0.0) == [0, 0]
    assert index().statistics() == statistics({})


def test_what_was_routed_to_a_rank_counts_there_and_nowhere_else() -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2, 3)), 0.0)
    assert folded.overlap(pack_u64((1, 2, 3)), (W1, W0), 0.0) == [0, 3]


@pytest.mark.parametrize(
    ("asked", "depth"),
    [((1, 2, 3, 4), 3), ((1, 2, 3), 3), ((1, 2), 2), ((1, 2, 9), 2), ((1, 9), 1), ((9, 2, 3), 0), ((2, 3), 0), ((), 0)],
)
def test_leading_blocks_count(asked: Sequence[int], depth: int) -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2, 3)), 0.0)
    assert overlap(folded, *asked) == depth


def test_requests_fork_where_they_differ() -> None:
    folded = index()
    for chain in ((1, 2, 3), (1, 2, 30), (1, 20), (1, 2, 3, 4), (5,)):
        folded.routed(W0, pack_u64(chain), 0.0)
    for chain in ((1, 2, 3, 4), (1, 2, 30), (1, 20), (5,)):
        assert overlap(folded, *chain, 99) == len(chain)
    assert kept(folded) == 7, "each block once"


def test_a_request_without_full_blocks_is_nothing() -> None:
    folded = index()
    folded.routed(W0, pack_u64(()), 0.0)
    assert folded.statistics().blocks == {}


# ---------------------------------------------------------------- time


def test_a_block_counts_until_its_time_is_over() -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2)), 5.0)
    assert [overlap(folded, 1, 2, now_s=now_s) for now_s in (14.999, 15.0)] == [2, 0]


def test_a_request_routed_again_renews_its_blocks() -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2, 3)), 0.0)
    folded.routed(W0, pack_u64((1, 2)), 5.0)
    assert [overlap(folded, 1, 2, 3, now_s=now_s) for now_s in (9.0, 10.0, 14.0, 15.0)] == [3, 2, 2, 0]


def test_time_takes_what_is_over_and_changes_no_answer() -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2, 3)), 0.0)
    folded.routed(W0, pack_u64((1, 2)), 5.0)
    folded.tick(12.0)
    assert overlap(folded, 1, 2, 3, now_s=12.0) == 2
    assert folded.statistics() == statistics({W0: 2}, expired=1)
    folded.tick(15.0)
    assert folded.statistics() == statistics({}, expired=3)


def test_what_is_over_goes_before_a_new_request_comes() -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2)), 0.0)
    folded.routed(W0, pack_u64((3,)), TTL_S)
    assert folded.statistics() == statistics({W0: 1}, expired=2)


# ---------------------------------------------------------------- room


def test_beyond_its_room_a_rank_loses_the_oldest_the_deepest_first() -> None:
    folded = index(blocks_max=4)
    folded.routed(W0, pack_u64((1, 2, 3)), 0.0)
    folded.routed(W0, pack_u64((4, 5)), 0.0)
    assert (overlap(folded, 1, 2, 3), overlap(folded, 4, 5)) == (2, 2)
    folded.routed(W0, pack_u64((6, 7, 8)), 0.0)
    assert (overlap(folded, 1, 2, 3), overlap(folded, 4, 5), overlap(folded, 6, 7, 8)) == (0, 1, 3)
    assert folded.statistics().evicted_blocks_total == 4


def test_a_parent_stays_for_as_long_as_its_youngest_child() -> None:
    folded = index(blocks_max=4)
    folded.routed(W0, pack_u64((1, 2, 3)), 0.0)
    folded.routed(W0, pack_u64((1, 2, 30)), 0.0)
    folded.routed(W0, pack_u64((9,)), 0.0)
    assert (overlap(folded, 1, 2, 3), overlap(folded, 1, 2, 30), overlap(folded, 9)) == (2, 3, 1)
    folded.routed(W0, pack_u64((8, 7)), 0.0)
    assert (overlap(folded, 1, 2, 30), overlap(folded, 9), overlap(folded, 8, 7)) == (1, 1, 2)


def test_of_a_request_larger_than_the_room_the_beginning_is_kept() -> None:
    folded = index(blocks_max=2)
    folded.routed(W0, pack_u64((1, 2, 3, 4)), 0.0)
    assert overlap(folded, 1, 2, 3, 4) == kept(folded) == 2


@pytest.mark.parametrize(("stated", "room"), [(0, 3), (2, 2), (3, 3), (9, 3)])
def test_the_room_is_what_the_worker_states_but_never_more_than_configured(stated: int, room: int) -> None:
    folded = index(blocks_max=3)
    folded.routed(W0, pack_u64((1, 2, 3, 4)), 0.0, stated)
    assert kept(folded) == room


def test_every_rank_has_room_of_its_own() -> None:
    folded = index(blocks_max=2)
    folded.routed(W0, pack_u64((1, 2)), 0.0)
    folded.routed(W1, pack_u64((3, 4)), 0.0)
    assert folded.statistics().blocks == {W0: 2, W1: 2}


# ---------------------------------------------------------------- leaving


def test_of_a_worker_that_is_forgotten_nothing_counts() -> None:
    folded = index()
    for each in (W0, WorkerRank("w0", 1), W1):
        folded.routed(each, pack_u64((1, 2)), 0.0)
    folded.forget("w0", 0.0)
    assert folded.overlap(pack_u64((1, 2)), (W0, WorkerRank("w0", 1), W1), 0.0) == [0, 0, 2]
    assert folded.statistics() == statistics({W1: 2}, left=4)


def test_what_was_over_when_its_worker_left_is_counted_as_over() -> None:
    folded = index()
    folded.routed(W0, pack_u64((1, 2)), 0.0)
    folded.routed(W0, pack_u64((1,)), 1.0)
    folded.forget("w0", TTL_S)
    assert folded.statistics() == statistics({}, expired=1, left=1)
