import pytest

from kv_protocol.ids import WorkerRank
from router.decision.history import HALF_LIFE_S, History

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)


def blocks(history: History, rank: WorkerRank, now_s: float) -> float:
    return float(history.columns((rank,), now_s)[0])


def test_it_halves_in_every_half_life() -> None:
    history = History()
    history.add(A0, 8.0, 100.0)
    assert [blocks(history, A0, 100.0 + times * HALF_LIFE_S) for times in range(4)] == [8.0, 4.0, 2.0, 1.0]
    assert blocks(history, A0, 100.0 + HALF_LIFE_S / 2) == pytest.approx(8 / 2**0.5)


def test_every_request_decays_from_its_own_time() -> None:
    history = History()
    history.add(A0, 8.0, 0.0)
    history.add(A0, 3.0, HALF_LIFE_S)
    assert blocks(history, A0, HALF_LIFE_S) == 7.0
    assert blocks(history, A0, 2 * HALF_LIFE_S) == 3.5


def test_only_the_ranks_of_a_left_worker_are_forgotten() -> None:
    history = History()
    for rank in (A0, A1, B0):
        history.add(rank, 8.0, 0.0)
    history.forget("a")
    assert [blocks(history, rank, 0.0) for rank in (A0, A1, B0)] == [0.0, 0.0, 8.0]


def test_after_a_very_long_time_it_is_nothing_and_no_error() -> None:
    history = History()
    history.add(A0, 1e300, 0.0)
    assert blocks(history, A0, 1e9) == 0.0


def test_after_many_half_lives_it_goes_on_as_if_there_had_been_fewer() -> None:
    early, late = History(), History()
    for history, begin_s in ((early, 0.0), (late, 10_000 * HALF_LIFE_S)):
        history.add(A0, 1.0, 0.0)
        for later_s in (0.0, 15.0, 100 * HALF_LIFE_S, 100 * HALF_LIFE_S + 15.0):
            history.add(A0, 5.0, begin_s + later_s)
    times = (100 * HALF_LIFE_S + 15.0, 10_100 * HALF_LIFE_S + 15.0)
    assert blocks(early, A0, times[0]) == blocks(late, A0, times[1]) == 5.0 + 5.0 * 2**-0.5
