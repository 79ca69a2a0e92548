"""However requests fall: a newcomer's share of full misses is at most one of 2 x ranks, until it has settled."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from router.decision.newcomers import GATHER_S, Newcomers
from tests.unit.router.samples import registered

BLOCKS = 1 << 20


def fleet(founders: int, joining: int) -> tuple[Newcomers, tuple[WorkerRank, ...]]:
    newcomers, ranks = Newcomers(), list[WorkerRank]()
    for number in range(founders + joining):
        told = registered(f"w{number}", total_kv_blocks=BLOCKS)
        newcomers.joined(told, 0.0 if number < founders else GATHER_S)
        ranks += told.ranks
    newcomers.used(ranks[0], BLOCKS)
    return newcomers, tuple(ranks)


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 99), max_size=200))
@settings(deadline=None)
def test_a_newcomer_gets_at_most_its_slice_of_any_stretch(founders: int, joining: int, wishes: list[int]) -> None:
    newcomers, ranks = fleet(founders, joining)
    got = dict.fromkeys(ranks, 0)
    for count, wish in enumerate(wishes, start=1):
        allowed = [rank for rank, spent in zip(ranks, newcomers.flags(ranks), strict=True) if not spent]
        winner = allowed[-1 - wish % len(allowed)]
        newcomers.missed(winner, ranks)
        got[winner] += 1
        for rank in ranks[founders:]:
            assert got[rank] <= Fraction(count, 2 * len(ranks))


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 6), max_size=60))
@settings(deadline=None)
def test_the_same_records_give_the_same_answers(founders: int, joining: int, winners: list[int]) -> None:
    answers = []
    for _ in range(2):
        newcomers, ranks = fleet(founders, joining)
        flags = []
        for winner in winners:
            newcomers.missed(ranks[winner % len(ranks)], ranks)
            flags.append(newcomers.flags(ranks))
        answers.append(flags)
    assert answers[0] == answers[1]
