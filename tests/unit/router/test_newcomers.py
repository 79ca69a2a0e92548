"""Which ranks are newcomers, until when, and how large the slice of full misses of each is."""

import pytest

from kv_protocol.ids import WorkerRank
from router.decision.newcomers import GATHER_S, Newcomers
from tests.unit.router.samples import rank, registered

BLOCKS = 100
W0, W1, NEW = rank("w0"), rank("w1"), rank("new")
RANKS = (W0, W1, NEW)


def working(*, is_settled: bool = True) -> Newcomers:
    """Return a fleet of two founders, and one worker that joined later."""
    newcomers = Newcomers()
    for worker_id in ("w0", "w1"):
        newcomers.joined(registered(worker_id, total_kv_blocks=BLOCKS), 0.0)
    if is_settled:
        newcomers.used(W0, BLOCKS // 4)
    newcomers.joined(registered("new", total_kv_blocks=BLOCKS), GATHER_S)
    return newcomers


def is_held_back(newcomers: Newcomers, of: WorkerRank = NEW) -> bool:
    return newcomers.flags(RANKS)[RANKS.index(of)]


def test_only_a_rank_that_joins_a_working_fleet_is_held_back() -> None:
    assert working().flags(RANKS) == (False, False, True)


def test_a_rank_of_the_first_registrations_is_a_founder() -> None:
    newcomers = Newcomers()
    newcomers.joined(registered("w0", total_kv_blocks=BLOCKS), 0.0)
    newcomers.used(W0, BLOCKS)
    newcomers.joined(registered("new", total_kv_blocks=BLOCKS), GATHER_S - 0.1)
    assert newcomers.flags((W0, NEW)) == (False, False)


def test_the_first_worker_of_another_model_is_a_founder() -> None:
    newcomers = working()
    newcomers.joined(registered("other", model="n", total_kv_blocks=BLOCKS), 2 * GATHER_S)
    assert newcomers.flags((rank("other"), W0)) == (False, False)


def test_while_no_rank_has_settled_none_is_held_back() -> None:
    newcomers = working(is_settled=False)
    assert newcomers.flags(RANKS) == (False, False, False)
    newcomers.used(W1, BLOCKS // 4)
    assert newcomers.flags(RANKS) == (False, False, True)


def test_a_quarter_of_its_blocks_in_use_settles_it_for_good() -> None:
    newcomers = working()
    newcomers.used(NEW, BLOCKS // 4 - 1)
    assert is_held_back(newcomers)
    newcomers.used(NEW, BLOCKS // 4)
    newcomers.used(NEW, 0)
    assert not is_held_back(newcomers)


def test_blocks_that_were_promised_to_it_settle_it_too() -> None:
    newcomers = working()
    newcomers.promised(NEW, 20.0)
    assert is_held_back(newcomers)
    newcomers.promised(NEW, 5.0)
    assert not is_held_back(newcomers)


def test_a_worker_that_does_not_state_its_blocks_is_no_newcomer() -> None:
    newcomers = working()
    newcomers.joined(registered("new", total_kv_blocks=0), GATHER_S)
    assert not is_held_back(newcomers)


def test_a_new_life_of_a_worker_is_a_newcomer() -> None:
    newcomers = working()
    newcomers.used(W1, BLOCKS)
    newcomers.joined(registered("w1", total_kv_blocks=BLOCKS), GATHER_S)
    assert is_held_back(newcomers, W1)


def test_a_left_rank_is_not_held_back_and_events_of_unknown_ranks_change_nothing() -> None:
    newcomers = working()
    newcomers.forget("new")
    newcomers.used(NEW, BLOCKS)
    newcomers.promised(NEW, 1.0)
    newcomers.missed(NEW, RANKS)
    assert newcomers.flags(RANKS) == (False, False, False)


def test_every_sixth_full_miss_of_three_ranks_may_be_its_own() -> None:
    newcomers, went = working(), []
    for _ in range(18):
        winner = W0 if is_held_back(newcomers) else NEW
        newcomers.missed(winner, RANKS)
        went.append(winner)
    assert [place for place, winner in enumerate(went) if winner == NEW] == [5, 11, 17]


def test_a_slice_that_was_not_taken_is_not_saved_up() -> None:
    newcomers = working()
    for _ in range(100):
        newcomers.missed(W0, RANKS)
    assert not is_held_back(newcomers)
    newcomers.missed(NEW, RANKS)
    assert is_held_back(newcomers)


@pytest.mark.parametrize("dp_ranks", [(0, 1), (0, 1, 2, 3)])
def test_each_rank_of_a_worker_has_its_own_slice(dp_ranks: tuple[int, ...]) -> None:
    newcomers = working()
    newcomers.joined(registered("new", total_kv_blocks=BLOCKS, dp_ranks=dp_ranks), GATHER_S)
    joined = tuple(WorkerRank("new", dp_rank) for dp_rank in dp_ranks)
    ranks = (W0, W1, *joined)
    for _ in range(2 * len(ranks) - 1):
        newcomers.missed(W0, ranks)
    assert newcomers.flags(ranks)[2:] == (False,) * len(joined)
    newcomers.missed(joined[0], ranks)
    assert newcomers.flags(ranks)[2:] == (True, *(False,) * (len(joined) - 1))
